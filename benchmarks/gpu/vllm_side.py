"""vLLM on the same prompts, in a process of its own: `vllm_side.py JOB.json`, a JSON line for each concurrency.

JOB: config (path of a config.json), concurrency, prompt, out, max_model_len, utilization, path (a folder with vllm).
Every step of its engine is driven and stamped here, as ours is.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.workload import Stamps, prompts, row_of


def say(**line: Any) -> None:
    print("PEER " + json.dumps(line), flush=True)


def main() -> None:
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    # In this process, so that steps can be stamped; its FlashInfer sampler would be compiled first.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if job.get("path"):
        sys.path.insert(0, job["path"])
    started = time.perf_counter()
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    vocab = int(json.loads(Path(job["config"]).read_text())["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(job["config"], Path(folder) / "config.json")
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enable_prefix_caching=False,
            max_model_len=job["max_model_len"],
            max_num_seqs=max(256, *job["concurrency"]),
            gpu_memory_utilization=job["utilization"],
        )
        engine = llm.llm_engine
        say(ready=vllm.__version__, load_s=round(time.perf_counter() - started, 1))

        def serve(texts: list[list[int]], out: int) -> tuple[float, list[Stamps], list[float]]:
            params = SamplingParams(
                temperature=0.0, max_tokens=out, ignore_eos=True, detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )  # fmt: skip
            for number, ids in enumerate(texts):
                engine.add_request(str(number), {"prompt_token_ids": ids}, params)
            # As with ours: all are queued, the first step has not begun.
            begun = time.perf_counter()
            tokens: list[Stamps] = [[] for _ in texts]
            steps: list[float] = []
            while engine.has_unfinished_requests():
                outputs = engine.step()
                now = time.perf_counter()
                made = [(int(o.request_id.partition("-")[0]), len(o.outputs[0].token_ids)) for o in outputs]
                for number, count in made:
                    if count:
                        tokens[number].append((now, count))
                if any(count for _, count in made):
                    steps.append(now)
            return begun, tokens, steps

        serve(prompts(4, job["prompt"], vocab, seed=99), 8)
        for count in job["concurrency"]:
            out = job["out"] + job["more"].get(str(count), 0)
            begun, tokens, steps = serve(prompts(count, job["prompt"], vocab), out)
            short = [number for number, stamps in enumerate(tokens) if sum(n for _, n in stamps) != out]
            if short:
                raise RuntimeError(f"requests {short[:5]} got another number of tokens than {out}")
            say(row=row_of(begun, tokens, steps, job["prompt"]))


if __name__ == "__main__":
    main()
