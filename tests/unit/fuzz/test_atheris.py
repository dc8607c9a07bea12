"""atheris over what reads public requests: atheris_public.py as a process, 30 s in CI, 600 s with KVMESH_SOAK=1.

With the 30 s of test_fuzz.py all of fuzzing takes 60 s in CI.

CI begins with the same seed every time; KVMESH_FUZZ_SEED repeats a longer run.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = bool(os.environ.get("KVMESH_SOAK"))
SECONDS = 600 if SOAK else 30
SEED = int(os.environ.get("KVMESH_FUZZ_SEED", "0")) or (random.SystemRandom().randrange(1, 1 << 31) if SOAK else 1)
PROGRAM = Path(__file__).with_name("atheris_public.py")
# The program itself bounds the time of a processor; this one is for what never comes back, however busy the machine.
HANG_S = 120
MAX_INPUT = 4096


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed here")
@pytest.mark.timeout(SECONDS + 500)
def test_whatever_a_client_sends_is_read_or_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    made = subprocess.run(
        [sys.executable, str(PROGRAM), "--write-corpus", str(corpus)], capture_output=True, text=True, timeout=200
    )
    assert made.returncode == 0, made.stderr[-4000:]
    options = [
        f"-max_total_time={SECONDS}",
        f"-seed={SEED}",
        f"-timeout={HANG_S}",
        # libFuzzer would look at a peak that includes that of this process; the program bounds its own memory.
        "-rss_limit_mb=0",
        f"-max_len={MAX_INPUT}",
        f"-dict={tmp_path / 'words.txt'}",
        f"-artifact_prefix={tmp_path}/found-",
        "-print_final_stats=1",
    ]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *options, str(corpus)],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SECONDS + HANG_S + 120,
    )
    shown = "\n".join(line for line in done.stderr.splitlines() if "Instrumenting" not in line)
    found = [f"{file.name}: {file.read_bytes()!r}" for file in sorted(tmp_path.glob("found-*"))]
    assert done.returncode == 0, f"seed {SEED}; {found}\n{shown[-8000:]}"
    assert not found, found
    runs = re.search(r"stat::number_of_executed_units:\s*(\d+)", shown)
    assert runs is not None, shown[-4000:]
    print(f"seed {SEED}: {runs[1]} inputs")
    assert int(runs[1]) > 100, shown[-4000:]
