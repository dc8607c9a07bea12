"""Benchmarks of the gateway over the scripted engine, each with its own `--help`.

python benchmarks/gateway.py rate|ttft|hits|many|stalled|litellm [...]
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "libs"), str(ROOT)]

PARTS = ("rate", "ttft", "hits", "many", "stalled", "litellm")


def main() -> int:
    """Hand over to `benchmarks/gateway/PART.py`."""
    if len(sys.argv) < 2 or sys.argv[1] not in PARTS:
        print(__doc__, file=sys.stderr)
        return 2
    name, rest = sys.argv[1], sys.argv[2:]
    part = importlib.import_module(f"gateway.{name}")
    sys.argv = [f"gateway.py {name}", *rest]
    return int((part.main(rest) if inspect.signature(part.main).parameters else part.main()) or 0)


if __name__ == "__main__":
    sys.exit(main())
