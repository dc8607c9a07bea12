"""A request that goes on from output it had elsewhere says what it would have said undisturbed.

The reference is a plain loop over transformers' model and processors, which knows nothing of replay.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from kvmesh.engine.core import Admitted, CoreEvent, Ended, EngineConfig, EngineCore, EngineRequest, RequestKey, Tokens
from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.sampling.noise import uniform
from kvmesh.engine.sampling.processors import distribution, draw
from kvmesh.engine.torch_runner import TorchRunner
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell
from model_tiny import make_tiny

PROMPT = np.random.default_rng(8).integers(3, 190, 21).tolist()
LENGTH, EARLIEST, CHOICE, PAGE = 12, 6, 2, 4
CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01),
    "penalized": SamplingParams(
        temperature=1.1, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.6, logit_bias={7: 1.5}
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, TorchRunner]:
    path = tmp_path_factory.mktemp("tiny")
    return make_tiny(path, "plain"), TorchRunner.load(str(path), "fp32")


def undisturbed(
    model: torch.nn.Module, params: SamplingParams, choice: int, stop: int
) -> tuple[list[int], list[float]]:
    """Output up to LENGTH tokens or `stop`, and each token's log-probability."""
    output: list[int] = []
    logprobs: list[float] = []
    while len(output) < LENGTH and stop not in output:
        ids = torch.tensor([PROMPT + output])
        with torch.no_grad():
            row = model(ids).logits[:, -1].float()
        raw = torch.log_softmax(row, -1)[0]
        row = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, row)
        counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=row.shape[-1])
        row = row - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        for token, bias in params.logit_bias.items():
            row[0, token] += bias
        row = MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, stop, "cpu")(ids, row)
        scores = row[0].numpy()
        if params.temperature:
            kept, probs = distribution(scores, params)
            output.append(draw(kept, probs, uniform(params.seed, choice, len(PROMPT) + len(output))))
        else:
            output.append(int(scores.argmax()))
        logprobs.append(float(raw[output[-1]]))
    return output, logprobs


class Engine:
    """A core over the torch runner, stepped by the test."""

    def __init__(self, runner: TorchRunner) -> None:
        layout = runner.layout(PAGE, 64)
        regions = {group.name: memoryview(bytearray(layout.region_bytes(group.name))) for group in layout.groups}
        doorbell = Doorbell(bytearray(DOORBELL_BYTES))
        runner.bind(layout, regions, doorbell)
        self.events: list[CoreEvent] = []
        config = EngineConfig(max_model_len=128, chunk_size=5, check_integrity=True)
        self.core = EngineCore(runner, layout, config, self.events.extend, doorbell=doorbell)
        self.cached = 0
        self._serial = 0

    def run(self, params: SamplingParams, output: list[int], **fields: Any) -> dict[int, list[Tokens]]:
        """The events of each choice of one request."""
        self._serial += 1
        key = RequestKey(f"r{self._serial}")
        self.events.clear()
        self.core.submit(
            EngineRequest(key, PROMPT + output, prompt_len=len(PROMPT), sampling=params, seed_bytes=b"s", **fields)
        )
        while self.core.step_once():
            pass
        told: dict[int, list[Tokens]] = {}
        for event in self.events:
            if isinstance(event, Tokens):
                told.setdefault(event.choice, []).append(event)
        (admitted,) = [event for event in self.events if isinstance(event, Admitted)]
        self.cached = admitted.cached_tokens
        (end,) = [event for event in self.events if isinstance(event, Ended)]
        assert end.error is None
        return told


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cached", [False, True], ids=["elsewhere", "where it ran"])
def test_replayed_output(tiny: tuple[torch.nn.Module, TorchRunner], case: str, cached: bool) -> None:
    model, runner = tiny
    plain = replace(CASES[case], max_tokens=LENGTH, seed=77, ignore_eos=True, want_logprobs=True)
    # A token that it would say too early is its stop token: min_tokens must count what was output elsewhere.
    stop = undisturbed(model, plain, CHOICE, -1)[0][2]
    params = replace(plain, min_tokens=EARLIEST, stop_token_ids=frozenset({stop}))
    whole, logprobs = undisturbed(model, params, CHOICE, stop)
    assert stop not in whole[:EARLIEST]
    engine = Engine(runner)
    if cached:
        engine.run(params, [], first_choice=CHOICE)
    for cut in range(1, len(whole)):
        if not cached:
            engine = Engine(runner)
        told = engine.run(params, whole[:cut], first_choice=CHOICE, want_cumulative_logprob=True)
        # Pages of the output are found again like those of the prompt.
        assert engine.cached == ((len(PROMPT) + cut - 1) // PAGE * PAGE if cached else 0)
        assert list(told) == [CHOICE]
        events = told[CHOICE]
        assert [event.first_position for event in events] == list(range(cut, len(whole)))
        assert [token for event in events for token in event.token_ids] == whole[cut:]
        assert events[-1].finish_reason is not None
        new = [score.logprob for event in events for score in event.logprobs]
        assert new == pytest.approx(logprobs[cut:], abs=1e-4)
        assert events[-1].cumulative_logprob == pytest.approx(sum(logprobs[cut:]), abs=1e-3)


def test_the_real_model_goes_on(smollm2_path: Path) -> None:
    """It may differ only from where two tokens are equally likely; positions follow on each other whatever it says."""
    runner = TorchRunner.load(str(smollm2_path), "fp32")
    length = 10
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, want_logprobs=True, logprobs=2)
    events = Engine(runner).run(params, [])[0]
    whole = [token for event in events for token in event.token_ids]
    margins = [score.top[0][1] - score.top[1][1] for event in events for score in event.logprobs]
    for cut in (1, 6):
        again = Engine(runner).run(params, whole[:cut])[0]
        assert [event.first_position for event in again] == list(range(cut, length))
        output = whole[:cut] + [token for event in again for token in event.token_ids]
        different = next((at for at in range(length) if output[at] != whole[at]), None)
        assert different is None or margins[different] < 1e-3
