"""vLLM on CPU as a peer: run by the interpreter that has vllm installed, spoken to in JSON lines on stdin and stdout.

    -> {"cell": "decode", "prompts": [[ids]], "steps": n} | {"cell": "prefill", "prompts": [[ids]]} | {"cell": "end"}
    <- {"wall": seconds, "cpu": seconds, "tokens": n}, first of all {"ready": version}

Eager, bf16, no prefix cache, engine in this process; threads come with OMP_NUM_THREADS from the caller.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    # vLLM logs to stdout: keep the real one for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1],
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=64,
        enable_prefix_caching=False,
    )
    engine = llm.llm_engine
    count = 0
    answers.write(json.dumps({"ready": vllm.__version__}) + "\n")
    for line in sys.stdin:
        job = json.loads(line)
        if job["cell"] == "end":
            break
        steps = job.get("steps", 0)
        prompts = job["prompts"]
        sampling = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True, detokenize=False)
        wall, cpu = time.perf_counter(), time.process_time()
        for prompt in prompts:
            count += 1
            engine.add_request(str(count), {"prompt_token_ids": prompt}, sampling)
        started: set[str] = set()
        tokens = sum(map(len, prompts))
        while engine.has_unfinished_requests():
            outputs = engine.step()
            before = len(started)
            started |= {output.request_id for output in outputs if output.outputs and output.outputs[0].token_ids}
            if steps and before < len(prompts) == len(started):
                # Every prompt is in: from here on it is decode alone.
                made = sum(len(output.outputs[0].token_ids) for output in outputs)
                tokens = len(prompts) * (steps + 1) - made
                wall, cpu = time.perf_counter(), time.process_time()
        elapsed = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "tokens": tokens}
        answers.write(json.dumps(elapsed) + "\n")


if __name__ == "__main__":
    main()
