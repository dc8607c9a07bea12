"""Tensor parallelism: who computes which part of a layer, and the collectives that put the parts together.

A column-parallel matrix holds some of the output rows of the (out, in) weight and needs no collective; a row-parallel
one holds some of its input columns, and the partial sums of all ranks are added. Embedding and head hold a part of the
vocabulary each: they are the largest matrices of a small model.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.nn import functional

from kvmesh.errors import InvalidArgument, Unavailable
from kvmesh.kv.sharding import check_sharding
from kvmesh.layers.linear import Linear, dense


class TensorParallel(Protocol):
    """A rank's place in its group. Collectives are called by every rank in the same order, with equal shapes.

    They raise Unavailable when another rank is gone or does not come in time; the group is then of no further use.
    """

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over all ranks IN PLACE; returns x. Equal to the last bit on every rank."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' x (…, n) side by side, in the order of the ranks: (…, size * n). On every rank."""

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The ranks' x one after the other: out (size * n, …) for x (n, …), both contiguous. Returns out."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x on every rank, IN PLACE; returns x. x must be contiguous."""

    def abort(self) -> None:
        """The group is lost: whoever waits in a collective, on the host or on a device, is let go, with what it had
        until then. Any thread may call it; returns at once."""


class Single:
    """A group of one: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x itself."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x itself."""
        return x

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """out, with x in it."""
        return out.copy_(x)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """x itself."""
        return x

    def abort(self) -> None:
        """Nobody waits."""


SINGLE = Single()


class GlooParallel:
    """`TensorParallel` on CPU over gloo, through the loopback device or another. A group of its own: torch's default
    process group is neither used nor set, so a process may be in several."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout_s: float, name: str = "tp", address: str = "127.0.0.1"
    ) -> None:
        """Meet the other ranks at `store` (a torch Store) under `name`; blocks until all are there.

        timeout_s: for the meeting and for every collective. address: of this host, where the other ranks reach it.
        Raises Unavailable.
        """
        self.rank, self.size = rank, size
        distributed = _distributed()
        gloo = distributed.ProcessGroupGloo
        try:
            options = gloo._Options()
            # Named: by default gloo takes the address that the host's name resolves to, whatever that is.
            options._devices = [gloo.create_device(hostname=address)]
            options._timeout = timedelta(seconds=timeout_s)
            self._group: Any = gloo(distributed.PrefixStore(name, store), rank, size, options)
            self._from_leader = distributed.distributed_c10d.BroadcastOptions()
        except RuntimeError as error:
            raise Unavailable(f"rank {rank} of {size} does not meet the others: {_first_line(error)}") from error

    def _wait(self, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise Unavailable(f"rank {self.rank} of {self.size}: a collective failed: {_first_line(error)}") from error

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `TensorParallel`. x must be contiguous."""
        if x.numel():
            self._wait(lambda: self._group.allreduce([x]))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `TensorParallel`."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        if x.numel():
            self._wait(lambda: self._group.allgather([parts], [x]))
        return torch.cat(parts, dim=-1)

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `TensorParallel`."""
        if x.numel():
            self._wait(lambda: self._group.allgather([list(out.view(self.size, *x.shape).unbind(0))], [x]))
        return out

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `TensorParallel`."""
        if x.numel():
            self._wait(lambda: self._group.broadcast([x], self._from_leader))
        return x

    def abort(self) -> None:
        """Nothing to do: connections break with the processes at their other ends."""


def leader_store(timeout_s: float, address: str = "127.0.0.1") -> tuple[Any, int]:
    """The store where ranks meet and the port it listens on: on that address only, and no port is guessed or raced for.

    Rank 0 makes and keeps it; the others open it with `member_store`.
    """
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port: int = listener.getsockname()[1]
    store = _distributed().TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s),
        # Taken over. Without it the store would listen on every address of the host.
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return store, port


def member_store(port: int, timeout_s: float, address: str = "127.0.0.1") -> Any:
    """The leader's store, seen from another rank. Raises Unavailable."""
    try:
        return _distributed().TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
    except RuntimeError as error:
        raise Unavailable(f"the leader's store does not answer: {_first_line(error)}") from error


def _distributed() -> Any:
    """torch.distributed, imported where it is needed: a single rank never needs it. (Any: its stubs lack what C++
    defines.)"""
    import torch.distributed

    return torch.distributed


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


# --- who has what ----------------------------------------------------------------------------------------------------


def part(total: int, tp: TensorParallel) -> slice:
    """This rank's equal part of `total` rows, columns or heads. InvalidArgument where they do not divide."""
    if total % tp.size:
        raise InvalidArgument(f"{total} do not divide among {tp.size} ranks")
    count = total // tp.size
    return slice(tp.rank * count, (tp.rank + 1) * count)


def kv_part(kv_heads: int, tp: TensorParallel) -> slice:
    """The KV heads that this rank holds, as `kvmesh.kv.sharding` and the layout have it: with more ranks than heads
    each head has several holders."""
    check_sharding("kv heads", kv_heads, tp.size)
    if tp.size > kv_heads:
        head = tp.rank // (tp.size // kv_heads)
        return slice(head, head + 1)
    return part(kv_heads, tp)


def scaled(heads: slice, width: int) -> slice:
    """The rows or columns of a range of heads, each `width` wide."""
    return slice(heads.start * width, heads.stop * width)


def vocab_part(vocab_size: int, tp: TensorParallel) -> tuple[slice, int]:
    """(this rank's token ids, rows that every rank's matrix has). The last ranks' matrices are filled up with zeros
    where the vocabulary does not divide, so it never forbids a size."""
    width = math.ceil(vocab_size / tp.size)
    first = min(tp.rank * width, vocab_size)
    return slice(first, min(first + width, vocab_size)), width


# --- layers ----------------------------------------------------------------------------------------------------------


class RowParallel:
    """A linear over this rank's columns: (tokens, in / size) → (tokens, out), summed over ranks.

    Only rank 0's `linear` may have the bias, or it would be added once a rank.
    """

    def __init__(self, linear: Linear, tp: TensorParallel) -> None:
        self.linear, self.tp = linear, tp

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(self.linear(x))


def row_parallel(weight: torch.Tensor, bias: torch.Tensor | None, tp: TensorParallel) -> Linear:
    """The handler of a row-parallel weight (out, in / size)."""
    linear = dense(weight, bias)
    return linear if tp.size == 1 else RowParallel(linear, tp)


class Embedding:
    """ids int64 (tokens,) → (tokens, hidden), from this rank's rows of the vocabulary (`vocab_part`)."""

    def __init__(self, weight: torch.Tensor, vocab_size: int, tp: TensorParallel) -> None:
        self.weight, self.tp = weight, tp
        self._ids, _ = vocab_part(vocab_size, tp)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return self.weight[ids]
        foreign = (ids < self._ids.start) | (ids >= self._ids.stop)
        x = functional.embedding((ids - self._ids.start).masked_fill_(foreign, 0), self.weight)
        # One rank has the row and the others add zeros, so the sum is exact.
        return self.tp.all_reduce(x.masked_fill_(foreign[:, None], 0))


class Head:
    """Hidden states (rows, hidden) → fp32 logits (rows, vocab) on every rank, from this rank's rows of the head."""

    def __init__(self, weight: torch.Tensor, vocab_size: int, tp: TensorParallel) -> None:
        self.linear, self.vocab_size, self.tp = dense(weight), vocab_size, tp

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.linear(hidden).float()
        return logits if self.tp.size == 1 else self.tp.all_gather(logits)[:, : self.vocab_size].contiguous()
