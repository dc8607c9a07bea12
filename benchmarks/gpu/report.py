"""Tables of the GPU engine benchmark: measured values beside floor, goal and peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

from gpu.floors import VLLM, Shape

# Decode step at 4,250 tokens of context, ms.
STEP_GOALS = {1: 4.3, 20: 7.0, 64: 12.8}
# Of the peer's tokens out a second, end to end.
OUT_GOALS = {20: 1.15, 64: 1.07}
PREFILL_GOALS = {1: 43_500, 10: 43_000, 20: 43_000, 64: 43_000, 128: 43_000}
IDLE_GOAL = 1.0


class Tee:
    """Prints, and keeps it in a file."""

    def __init__(self, path: Path | None) -> None:
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")

    def __call__(self, line: str = "") -> None:
        print(line, flush=True)
        if self._file is not None:
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _met(met: bool) -> str:
    return "met" if met else "MISSED"


def table(
    rows: list[dict[str, Any]], shape: Shape | None, prompt: int, out: int, peer: dict[str, Any], standard: bool
) -> list[str]:
    """Lines. shape None: no floors (another machine). peer: what `run_vllm` told; {} = the published figures stand in.
    standard: the workload is the published one, so that end to end figures compare."""
    measured = {row["concurrency"]: row for row in peer.get("rows", [])}
    name = f"vLLM {peer['version']}, measured here" if measured else "vLLM 0.25.0, published"
    lines = [
        f"{prompt} tokens in, {out} out, all at once; beside: floor, {name}, ratio (above 1: we are faster)",
        f"{'n':>4} | {'prefill tok/s':>13} {'floor':>7} {'vLLM':>7} {'ratio':>6} {'goal':>12} | {'step ms':>8} "
        f"{'floor':>6} {'vLLM':>6} {'ratio':>6} {'goal':>11} | {'device ms':>9} {'idle %':>7} {'gap µs':>7} "
        f"{'host ms':>7} | {'decode':>7} {'vLLM':>6} | {'end to end':>10} {'vLLM':>6} {'ratio':>6} {'goal':>12}",
    ]
    for row in rows:
        n = row["concurrency"]
        context = row.get("context", prompt + out / 2)
        theirs: dict[str, float] = {}
        if n in measured:
            theirs = measured[n]
        elif not measured and n in VLLM:
            theirs = dict(zip(("prefill_tok_s", "step_ms", "decode_tok_s", "out_tok_s"), VLLM[n], strict=True))

        def ratio(key: str, theirs: dict[str, float] = theirs, row: dict[str, Any] = row) -> str:
            if not theirs.get(key) or not row.get(key):
                return ""
            value = theirs[key] / row[key] if key.endswith("_ms") else row[key] / theirs[key]
            return f"{value:.3f}"

        def show(key: str, form: str, theirs: dict[str, float] = theirs) -> str:
            return format(theirs[key], form) if theirs.get(key) else ""

        step_goal, prefill_goal, out_goal = STEP_GOALS.get(n), PREFILL_GOALS.get(n), OUT_GOALS.get(n)
        goals = ["", "", ""]
        if step_goal and row["step_ms"]:
            goals[0] = f"{step_goal:g} {_met(row['step_ms'] <= step_goal)}"
        if prefill_goal and row.get("prefill_tok_s"):
            goals[1] = f"{prefill_goal} {_met(row['prefill_tok_s'] >= prefill_goal)}"
        end_to_end = row.get("out_tok_s") if standard else None
        if end_to_end and out_goal and theirs.get("out_tok_s"):
            goals[2] = f"{out_goal:g}x {_met(end_to_end >= out_goal * theirs['out_tok_s'])}"
        floors = ("", "")
        if shape is not None:
            floors = f"{shape.prefill_rate(prompt):.0f}", f"{shape.decode_ms(n, context):.2f}"
        idle = f"{row['device_idle_percent']:.2f}" if "device_idle_percent" in row else ""
        gap = f"{row['device_gap_us']:.1f}" if "device_gap_us" in row else ""
        device = f"{row['device_step_ms']:.3f}" if "device_step_ms" in row else ""
        host = f"{row['host_cpu_ms']:.3f}" if "host_cpu_ms" in row else ""
        lines.append(
            f"{n:>4} | {row.get('prefill_tok_s') or '':>13} {floors[0]:>7} {show('prefill_tok_s', '.0f'):>7} "
            f"{ratio('prefill_tok_s'):>6} {goals[1]:>12} | {row['step_ms']:>8.3f} {floors[1]:>6} "
            f"{show('step_ms', '.2f'):>6} {ratio('step_ms'):>6} {goals[0]:>11} | {device:>9} {idle:>7} {gap:>7} "
            f"{host:>7} | {row.get('decode_tok_s') or '':>7} {show('decode_tok_s', '.0f'):>6} | "
            f"{end_to_end or '':>10} {show('out_tok_s', '.0f') if standard else '':>6} "
            f"{ratio('out_tok_s') if standard else '':>6} {goals[2]:>12}"
        )
    idles = [row["device_idle_percent"] for row in rows if "device_idle_percent" in row]
    if idles:
        lines.append(
            f"device idle between steps: at most {max(idles):.2f} % of a step, goal {IDLE_GOAL:g}: "
            f"{_met(max(idles) <= IDLE_GOAL)}"
        )
    return lines


def kernels(rows: list[dict[str, Any]], least_us: float = 1.0) -> list[str]:
    """A profile's lines, and their sum."""
    lines = [f"{'µs a step':>10} {'launches':>9}  kernel"]
    lines += [
        f"{row['us_a_step']:>10.1f} {row['launches_a_step']:>9.1f}  {row['kernel'][:110]}"
        for row in rows
        if row["us_a_step"] >= least_us
    ]
    lines.append(f"{sum(row['us_a_step'] for row in rows):>10.1f} {sum(r['launches_a_step'] for r in rows):>9.1f}  sum")
    return lines
