"""Write the dashboards' JSON: what ``make dashboards`` runs."""

from __future__ import annotations

from pathlib import Path

from monitoring.dashboards.fleet import FLEET
from monitoring.dashboards.panels import to_json
from monitoring.dashboards.pods import PODS

FOLDER = Path(__file__).parent / "json"
BOARDS = (FLEET, PODS)


def main() -> None:
    """Write one file for each dashboard."""
    FOLDER.mkdir(exist_ok=True)
    for board in BOARDS:
        path = FOLDER / f"{board.uid}.json"
        path.write_text(to_json(board), encoding="utf-8")
        print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    main()
