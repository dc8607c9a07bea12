"""Mixture of experts: a router that chooses, and experts that compute on the tokens they were chosen for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from kvmesh.layers.linear import Linear
from kvmesh.loading.config import MoeConfig


class GatedMlp:
    """down(silu(gate x) * up x); `gate_up` stacks the rows of both."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Router:
    """Which experts each token gets (`MoeConfig` tells the methods). fp32, whatever the model's dtype: a choice flips
    where rounding does. Several ranks each decide alone, which is safe because they see the same hidden states to the
    last bit."""

    def __init__(self, config: MoeConfig, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight: (experts, hidden); bias: (experts,), noaux_tc's, for choosing alone."""
        self.config, self.weight, self.bias = config, weight, bias

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x (tokens, hidden) → (weights fp32, expert ids int64), both (tokens, experts_per_token)."""
        c = self.config
        logits = functional.linear(x.float(), self.weight)
        scores = logits.sigmoid() if c.method == "noaux_tc" else logits.softmax(dim=-1)
        ranked = scores if self.bias is None else scores + self.bias
        if c.method != "greedy":
            ranked = ranked.masked_fill(self._outside(ranked), -torch.inf)
        chosen = ranked.topk(c.experts_per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
        if c.normalize:
            # The addend keeps a row whose sigmoids all underflow finite.
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * c.scaling, chosen

    def _outside(self, ranked: torch.Tensor) -> torch.Tensor:
        """bool (tokens, experts): not in one of the token's best groups."""
        c = self.config
        grouped = ranked.view(len(ranked), c.groups, -1)
        best = grouped.topk(2 if c.method == "noaux_tc" else 1, dim=-1).values.sum(dim=-1)
        outside = torch.ones_like(best, dtype=torch.bool)
        outside.scatter_(1, best.topk(c.top_groups, dim=-1).indices, False)
        return outside.repeat_interleave(grouped.shape[-1], dim=1)


class Moe:
    """Routed experts plus what every token gets: (tokens, hidden) → the same, fp32. A rank's part of the sum where its
    experts are parts."""

    def __init__(self, router: Router, experts: Sequence[GatedMlp], shared: GatedMlp | None) -> None:
        self.router, self.experts, self.shared = router, experts, shared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x)
        out = self.shared(x).float() if self.shared is not None else torch.zeros(x.shape, dtype=torch.float32)
        # Sorted by expert, so that each is one matrix product over its tokens; within an expert, by token.
        order = chosen.flatten().argsort(stable=True)
        tokens, scale = order // chosen.shape[1], weights.flatten()[order, None]
        at = 0
        for expert, count in enumerate(chosen.flatten().bincount(minlength=len(self.experts)).tolist()):
            if count:
                end = at + count
                out.index_add_(0, tokens[at:end], self.experts[expert](x[tokens[at:end]]).float() * scale[at:end])
                at = end
        return out
