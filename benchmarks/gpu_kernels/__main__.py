"""Runs the kernel benchmarks by name, each module's `main(argv)`; one that fails does not keep the others from running.

    python -m benchmarks.gpu_kernels [gemm attention fusions sampling] [--out DIR] [-- ARGUMENTS OF THE MODULES]

Writes DIR/gpu_kernels_NAME.json (what the module returns or writes under --out) and DIR/gpu_kernels.log.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
import time
import traceback
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "libs", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

NAMES = ("gemm", "attention", "fusions", "sampling")


class Both(io.TextIOBase):
    """Standard output, and a file that keeps it."""

    def __init__(self, first: TextIO, second: TextIO) -> None:
        self._both = (first, second)

    def write(self, text: str) -> int:
        for stream in self._both:
            stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self._both:
            stream.flush()


def run(name: str, out: Path | None, rest: list[str]) -> bool:
    """True if it ran to its end."""
    path = out / f"gpu_kernels_{name}.json" if out is not None else None
    begun = time.perf_counter()
    print(f"== {name}", flush=True)
    try:
        module = importlib.import_module(f"benchmarks.gpu_kernels.{name}")
        argv = sys.argv
        arguments = [*(["--out", str(path)] if path is not None else []), *rest]
        sys.argv = [f"{name}.py", *arguments]
        try:
            # Whichever of the two ways a module has to be given its arguments.
            returned = module.main(arguments) if module.main.__code__.co_argcount else module.main()
        finally:
            sys.argv = argv
        if path is not None and not path.exists() and returned is not None and not isinstance(returned, int):
            path.write_text(json.dumps(returned, indent=1) + "\n", encoding="utf-8")
    except SystemExit as error:
        if error.code:
            print(f"== {name} FAILED: {error.code}", flush=True)
            return False
    except Exception:
        traceback.print_exc(file=sys.stdout)
        print(f"== {name} FAILED", flush=True)
        return False
    print(f"== {name}: {time.perf_counter() - begun:.1f} s", flush=True)
    return True


def main() -> int:
    argv, _, rest = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all that are there")
    parser.add_argument("--out", type=Path, help="folder")
    args = parser.parse_args(argv.split())
    present = [name for name in NAMES if Path(__file__).with_name(f"{name}.py").exists()]
    with contextlib.ExitStack() as stack:
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((args.out / "gpu_kernels.log").open("w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(Both(sys.stdout, file)))  # type: ignore[type-var]
        done = [run(name, args.out, rest.split()) for name in args.names or present]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
