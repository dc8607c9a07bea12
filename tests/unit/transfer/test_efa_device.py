"""What the efa transport asks of a machine, and its window of credits, without links."""

from __future__ import annotations

import random
import sys
from collections import deque
from types import ModuleType
from typing import Any

import pytest

from kvmesh.errors import DataLoss, FailedPrecondition, Internal, InvalidArgument, Unavailable
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.efa import EfaOptions, EfaTransport, shim
from kvmesh.transfer.transports.efa.device import EfaDevice
from kvmesh.transfer.transports.efa.stub import CAP_RDMA_WRITE, CAP_RNR_RETRY, EfaStubNetwork
from kvmesh.transfer.transports.efa.window import WORD_RECEIVES, WORDS_IN_FLIGHT, SendWindow
from kvmesh.transfer.transports.verbs.credits import ReceiveCredits
from test_verbs_shim import install

REASONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no device": ({}, {"devices": ()}, "no RDMA device"),
    "another name": ({"device": "efa7"}, {}, "no RDMA device 'efa7'; there is efa0"),
    "port": ({}, {"active": False}, "not active"),
    "not EFA": ({}, {"devices": ("rxe0",), "efa": ()}, "rxe0 is no EFA device (errno 95)"),
    "none of several": ({}, {"devices": ("mlx5_0", "mlx5_1"), "efa": ()}, "mlx5_0 is no EFA device (errno 95)"),
    "no writes": ({}, {"caps": CAP_RNR_RETRY}, "cannot do RDMA writes (device_caps 0x2)"),
    "pyverbs": ({}, {"can_write": False}, "RDMA writes by SRD need pyverbs 59"),
    "small writes": ({}, {"max_rdma": 512}, "max_rdma_size 512"),
    "queue": ({}, {"max_cqe": 100}, "max_cqe 100, 260 are needed"),
    "no notifications": ({}, {"notifies": False}, "no completion queue of 2 entries"),
    "no queue pairs": ({}, {"max_pairs": 0}, "no SRD queue pair"),
}


@pytest.mark.parametrize("name", REASONS)
async def test_reasons_why_not(name: str) -> None:
    options, machine, reason = REASONS[name]
    network = EfaStubNetwork()
    transport = EfaTransport(EfaOptions(polling="events", **options), network.api(**machine))
    with pytest.raises((Unavailable, FailedPrecondition)):
        await transport.start()
    assert transport.status[0] is False
    assert reason in transport.status[1]
    await transport.close()
    assert network.open_objects == 0
    assert network.violations == []


async def test_the_first_that_can_is_taken_and_named() -> None:
    network = EfaStubNetwork()
    api = network.api(devices=("mlx5_0", "rdmap0s2"), efa=("rdmap0s2",), caps=CAP_RDMA_WRITE)
    transport = EfaTransport(EfaOptions(polling="events"), api)
    await transport.start()
    assert transport.status == (True, "rdmap0s2 port 1 gid 0, completion channels")
    assert transport.judge(transport.offer()) == (True, "RDMA by rdmap0s2")
    assert transport.offer() == pb.TransportOffer(name="efa")
    await transport.close()
    assert transport.status == (False, "closed")
    assert network.violations == []


def test_max_write_is_the_smaller() -> None:
    network = EfaStubNetwork()
    for options, machine, want in (
        ({}, {}, 1 << 30),
        ({"max_write": 1 << 20}, {}, 1 << 20),
        ({"max_write": 1 << 31}, {"max_rdma": 1 << 16}, 1 << 16),
    ):
        device = EfaDevice(network.api(**machine), EfaOptions(**options))
        assert device.max_write == want
        device.close()
    assert network.violations == []


def test_handles_are_one_per_device_and_end_with_their_last_user() -> None:
    network = EfaStubNetwork()
    device = EfaDevice(network.api(), EfaOptions())
    first, second = bytes(15) + b"\x01", bytes(15) + b"\x02"
    one = device.peer(first)
    assert device.peer(first) == one
    other = device.peer(second)
    assert other.number != one.number
    device.release_peer(one)
    assert device.peers == 2
    device.release_peer(one)
    assert device.peers == 1
    with pytest.raises(InvalidArgument):
        device.release_peer(one)
    device.close()
    assert network.open_objects == 0
    assert network.violations == []


def test_options_are_checked() -> None:
    for wrong in (
        {"send_depth": 0},
        {"receives": 1},
        {"batch": 0},
        {"polling": "never"},
        {"port": 0},
        {"max_write": -1},
    ):
        with pytest.raises(InvalidArgument, match="efa: "):
            EfaOptions(**wrong)  # type: ignore[arg-type]


# --- the shim ---------------------------------------------------------------------------------------------------------


def install_efa(monkeypatch: pytest.MonkeyPatch, enums: str, names: tuple[str, ...]) -> None:
    install(monkeypatch, enums, lambda context: None)
    for name in ("providers", "providers.efa", "providers.efa.efadv"):
        module = ModuleType(f"pyverbs.{name}")
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in names:
        setattr(sys.modules["pyverbs.providers.efa.efadv"], name, name)


CLASSES = ("EfaContext", "EfaAH", "EfaQPInitAttr", "SRDQPEx")


def test_shim_tells_versions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    install_efa(monkeypatch, "libibverbs_enums", CLASSES)
    api = shim.load_efa()
    assert (api.can_write, api.SRDQPEx, api.verbs.version) == (True, "SRDQPEx", "59")
    install_efa(monkeypatch, "enums", CLASSES)
    assert not shim.load_efa().can_write


def test_shim_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    install_efa(monkeypatch, "libibverbs_enums", CLASSES[:2])
    with pytest.raises(Unavailable, match="without its EFA provider"):
        shim.load_efa()
    monkeypatch.setitem(sys.modules, "pyverbs.providers.efa.efadv", None)
    with pytest.raises(Unavailable, match="without its EFA provider"):
        shim.load_efa()


# --- the window -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "receives"), [(1, 2), (8, 2), (3, 8), (64, 5), (4, 64), (257, 31)])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_overflows_whoever_is_slow(depth: int, receives: int, seed: int) -> None:
    """A model of an unordered wire beside the accounts: no queue exceeds its depth, every write finds a receive, every
    word finds one, and neither end gets stuck."""
    draw = random.Random(seed)
    send, receive = SendWindow(depth, receives), ReceiveCredits(receives, WORDS_IN_FLIGHT)
    flying = landed = uncollected = 0
    posted = receives
    words_flying: list[int] = []
    words_at_writer: deque[int] = deque()
    words_done = 0
    done = 0
    for _ in range(6000):
        action = draw.randrange(7)
        if action == 0 and send.room:
            count = draw.randint(1, send.room)
            send.take(count)
            flying += count
            assert flying + uncollected <= depth, "the send queue overflows"
        elif action == 1 and flying:
            assert posted > 0, "a write finds no receive"
            flying, posted, landed, uncollected = flying - 1, posted - 1, landed + 1, uncollected + 1
        elif action == 2 and uncollected:
            uncollected -= 1
            send.completed()
            done += 1
        elif action == 3 and (landed or receive.missing):
            if landed:
                landed -= 1
                receive.consumed()
            if draw.random() < 0.7:
                posted += receive.missing
                assert posted <= receives, "the receive queue overflows"
                receive.reposted(receive.missing)
        elif action == 4:
            word = receive.due()
            if word is not None:
                words_flying.append(word)
                receive.telling()
                assert len(words_flying) + words_done <= WORDS_IN_FLIGHT, "the destination's send queue overflows"
        elif action == 5 and words_flying:
            words_at_writer.append(words_flying.pop())
            assert len(words_at_writer) <= WORD_RECEIVES, "a word finds no receive"
            words_done += 1
        elif action == 6:
            if words_done:
                words_done -= 1
                receive.told()
            if words_at_writer and draw.random() < 0.5:
                # Completions come in any order too.
                words_at_writer.rotate(draw.randrange(2))
                send.returned(words_at_writer.popleft())
    assert done > 100


def test_words_wrap_around_and_old_ones_say_nothing() -> None:
    window = SendWindow(4, 4)
    told = 4
    for _ in range(10):
        window._started = window._completed = window._granted = window._granted + (1 << 29)
        told = (window._granted + 4) % (1 << 32)
        window.returned(told)
        assert window.room == 4
        window.returned((told - 2) % (1 << 32))
        assert window.room == 4
        with pytest.raises(DataLoss):
            window.returned((told + 1) % (1 << 32))
    with pytest.raises(DataLoss):
        SendWindow(4, 4).returned(3)


def test_window_refuses_what_it_did_not_allow() -> None:
    window = SendWindow(4, 2)
    with pytest.raises(Internal):
        window.take(3)
    with pytest.raises(DataLoss):
        window.completed()
    window.take(2)
    assert (window.room, window.outstanding) == (0, 2)
    window.abandon()
    assert window.outstanding == 0
