"""`python -m tools.dashboards` writes the dashboards; `--check` fails where a file is not what would be written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tools.dashboards.engine import MEMORY, SPECULATION, TRANSFER
from tools.dashboards.fleet import FLEET
from tools.dashboards.grafana import render
from tools.dashboards.router import CACHE, ROUTING
from tools.dashboards.tenants import TENANTS

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "dashboards"
BOARDS = (FLEET, ROUTING, CACHE, TRANSFER, MEMORY, SPECULATION, TENANTS)


def dashboards() -> dict[str, str]:
    """File name and text of every dashboard."""
    return {f"{board.uid}.json": json.dumps(render(board), indent=2, ensure_ascii=False) + "\n" for board in BOARDS}


def main() -> int:
    """Exit status."""
    made = dashboards()
    if "--check" in sys.argv:
        there = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
        stale = sorted(name for name in made.keys() | there.keys() if made.get(name) != there.get(name))
        if stale:
            print(f"not what `python -m tools.dashboards` writes: {', '.join(stale)}", file=sys.stderr)
        return bool(stale)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.glob("*.json"):
        path.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
