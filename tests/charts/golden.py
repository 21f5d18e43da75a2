"""The presets' renders as checked in: ``python -m tests.charts.golden`` writes them anew.

They show in a review what a change of the chart does to what is installed. Texts of the chart's files are left out:
tests of their own hold them to their sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.charts.rendering import PRESETS, ROOT, render

FOLDER = Path(__file__).with_name("golden_renders")
_FILE = re.compile(r"^  (\S+\.(json|toml)): \|-?$")


def golden() -> dict[Path, str]:
    """Every file and what it has to hold."""
    return {FOLDER / f"{name_of(path)}.yaml": shown(render(preset=path).text) for path in PRESETS}


def shown(text: str) -> str:
    """A render without the texts of files, and without empty lines: Helm's majors put these in different places."""
    return "".join(f"{line}\n" for line in _without_files(text.splitlines()) if line.strip())


def _without_files(lines: list[str]) -> Iterator[str]:
    inside = False
    for line in lines:
        if inside and (not line.strip() or line.startswith("    ")):
            continue
        inside = _FILE.match(line) is not None
        yield f"{line} (left out)" if inside else line


def name_of(preset: Path) -> str:
    """A preset's name."""
    return preset.name.removesuffix("-values.yaml")


def main() -> None:
    """Write every render, and remove those of presets that are gone."""
    wanted = golden()
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.yaml"):
        if path not in wanted:
            path.unlink()
            print(f"removed {path.relative_to(ROOT)}")
    for path, text in wanted.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
