"""Write what the chart holds copies of: ``python -m charts.generate``, or ``make chart-files``.

Helm packs only what lies in the chart's folder, so the rules, dashboards and workloads that the project keeps
elsewhere are copied into ``files``, and the table of values in the README is made from the comments in
``values.yaml``. A test holds all of it to its sources.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "vllm-spans"
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
COPIES = {
    "rules": (ROOT / "monitoring" / "rules", "*.yaml"),
    "dashboards": (ROOT / "monitoring" / "dashboards" / "json", "*.json"),
    "workloads": (ROOT / "loadtests" / "workloads" / "files", "*.toml"),
}
"""Folder below ``files`` -> where its files come from."""


class DocsError(ValueError):
    """Values that cannot be made a table of; the text names the key."""


@dataclass(frozen=True)
class Value:
    """A row of the table.

    Attributes:
        key: Path with dots.
        default: As JSON.
        text: What its comment says.
    """

    key: str
    default: str
    text: str


def generated() -> dict[Path, str]:
    """Every generated file and what it has to hold.

    Raises:
        DocsError: A value is not documented, or the README has no place for the table.
    """
    files = {
        CHART / "files" / name / source.name: source.read_text(encoding="utf-8")
        for name, (folder, pattern) in COPIES.items()
        for source in sorted(folder.glob(pattern))
    }
    readme = CHART / "README.md"
    table = values_table((CHART / "values.yaml").read_text(encoding="utf-8"))
    files[readme] = with_table(readme.read_text(encoding="utf-8"), table)
    return files


def stale() -> list[Path]:
    """Files in the chart's ``files`` whose source is gone."""
    wanted = generated().keys()
    return [
        path
        for name in COPIES
        for path in sorted((CHART / "files" / name).glob("*"))
        if path not in wanted
    ]


def with_table(readme: str, table: str) -> str:
    """The README with the table between its two marks.

    Raises:
        DocsError: It lacks a mark.
    """
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise DocsError(f"the chart's README needs the lines {BEGIN} and {END} around its table")
    return f"{head}{BEGIN}\n{table}{END}{tail}"


def values_table(text: str) -> str:
    """Tables of all values, one for each key of the top level.

    Args:
        text: ``values.yaml``. The comment directly above a key documents it. A mapping is documented key by key, or
            as a whole if it has a comment and none of its keys does.

    Raises:
        DocsError: A value is not documented.
    """
    lines = text.splitlines()
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    written = []
    for key, node in root.value:
        comment = _comment(lines, key.start_mark)
        rows = list(_rows(key.value, comment, node, lines))
        written.append(f"\n### `{key.value}`\n\n")
        if comment and [row.key for row in rows] != [key.value]:
            written.append(f"{comment}\n\n")
        written.append("| value | default | meaning |\n| --- | --- | --- |\n")
        written += [f"| `{row.key}` | `{row.default}` | {row.text} |\n" for row in rows]
    return "".join(written) + "\n"


def _rows(path: str, comment: str, node: yaml.Node, lines: list[str]) -> Iterator[Value]:
    if isinstance(node, yaml.MappingNode) and node.value and not _is_whole(comment, node, lines):
        for key, value in node.value:
            below = _comment(lines, key.start_mark)
            yield from _rows(f"{path}.{key.value}", below, value, lines)
        return
    if not comment:
        raise DocsError(
            f"values.yaml, line {node.start_mark.line + 1}: {path} has no comment above it"
        )
    yield Value(path, _cell(json.dumps(_plain(node), ensure_ascii=False)), _cell(comment))


def _is_whole(comment: str, node: yaml.MappingNode, lines: list[str]) -> bool:
    return bool(comment) and not any(_documented(key, value, lines) for key, value in node.value)


def _documented(key: yaml.Node, value: yaml.Node, lines: list[str]) -> bool:
    """Has a key or one below it a comment?"""
    if _comment(lines, key.start_mark):
        return True
    below = value.value if isinstance(value, yaml.MappingNode) else ()
    return any(_documented(*each, lines) for each in below)


def _comment(lines: list[str], mark: yaml.Mark) -> str:
    """The comment lines right above a key, at its own depth."""
    prefix = " " * mark.column + "#"
    found: list[str] = []
    for line in reversed(lines[: mark.line]):
        if not line.startswith(prefix):
            break
        found.append(line.removeprefix(prefix).strip())
    return " ".join(reversed(found)).strip()


def _plain(node: yaml.Node) -> Any:
    return yaml.SafeLoader("").construct_document(node) if node is not None else None


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Write every generated file, and remove copies of what is gone.

    Returns:
        The exit status.
    """
    try:
        files = generated()
    except DocsError as error:
        print(error, file=sys.stderr)
        return 1
    for path in stale():
        path.unlink()
        print(f"removed {path.relative_to(ROOT)}")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
