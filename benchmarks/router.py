"""Benchmarks of the router, each with its own `--help`.

python benchmarks/router.py simulation|decisions|quality|near|complexity [...]
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "libs"), str(ROOT)]

PARTS = ("simulation", "decisions", "quality", "near", "complexity")


def main() -> int:
    """Hand over to `benchmarks/router/PART.py`."""
    if len(sys.argv) < 2 or sys.argv[1] not in PARTS:
        print(__doc__, file=sys.stderr)
        return 2
    part = importlib.import_module(f"router.{sys.argv[1]}")
    return int(part.main(sys.argv[2:]) or 0)


if __name__ == "__main__":
    sys.exit(main())
