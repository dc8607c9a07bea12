"""Benchmarks of the router, each with its own `--help`.

python benchmarks/router.py simulation|decisions|quality|near|complexity|judge|blind [...]
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "libs"), str(ROOT)]

PARTS = ("simulation", "decisions", "quality", "near", "complexity", "judge", "blind")


def main() -> int:
    """Hand over to `benchmarks/router/PART.py`."""
    if len(sys.argv) < 2 or sys.argv[1] not in PARTS:
        print(__doc__, file=sys.stderr)
        return 2
    name, rest = sys.argv[1], sys.argv[2:]
    part = importlib.import_module(f"router.{name}")
    sys.argv = [f"router.py {name}", *rest]
    return int((part.main(rest) if inspect.signature(part.main).parameters else part.main()) or 0)


if __name__ == "__main__":
    sys.exit(main())
