"""A model with latent attention and experts through the whole mesh: tokens stream from decode after their prompt's
latents were computed by prefill and moved. No download: the model is random and small."""

from __future__ import annotations

from pathlib import Path

import torch

from kvmesh.cli.plan import MeshOptions
from mesh_kit import PATIENT, mesh_up
from tests.unit.model.mla_tiny import make_mla_service

# A prompt of several pages whose last is not full, and an answer long enough to fill further ones.
PROMPT = list(b"The rivers of the north freeze late in the year, and those of the south do not freeze at all.")
TOKENS = 40


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """What transformers continues with, and that no token of it is a close call (rounding could then decide)."""
    ids = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            best = model(torch.tensor([ids])).logits[0, -1].topk(2)
        assert best.values[0] - best.values[1] > 1e-3
        ids.append(int(best.indices[0]))
    return ids[len(prompt) :]


async def test_a_disaggregated_stream_of_two_ranks_a_side_equals_transformers(tmp_path: Path) -> None:
    directory = tmp_path / "tiny-mla"
    expected = greedy(make_mla_service(directory), PROMPT, TOKENS)
    options = MeshOptions(
        model=str(directory), dtype="fp32", gateway_port=0, threads=1, embedder="none", cache=False,
        settings={
            "prefill.chunk_size": "32", "prefill.num_pages": "64", "decode.num_pages": "64",
            "prefill.tp": "2", "decode.tp": "2", **PATIENT,
        },
    )  # fmt: skip
    async with mesh_up(options) as mesh, mesh.client() as client:
        tokens: list[int] = []
        finished = None
        call = client.generate(PROMPT, model=mesh.model, max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        async with call as stream:
            async for event in stream:
                assert not event.HasField("error"), event.error
                if event.HasField("delta"):
                    tokens.extend(event.delta.token_ids)
                elif event.HasField("finished"):
                    finished = event.finished
    assert tokens == expected
    assert finished is not None
    assert finished.served.prefill_worker == "prefill-0"
    # Whole pages of 16 tokens, three layers, 40 fp32 elements a token; each rank of decode holds all of it.
    pages = -(-(len(PROMPT) - 1) // 16)
    assert finished.served.transfer_bytes == 2 * pages * 16 * 40 * 4 * 3
