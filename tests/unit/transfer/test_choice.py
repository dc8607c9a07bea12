"""Every transport is judged on both ends, with its reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import FailedPrecondition, Unavailable
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.sidecar import choice
from kvmesh.transfer.sidecar.choice import bounded, choose, one_line, reason_code


class Fake:
    def __init__(self, usable: bool = True, why: str = "fine", fits: bool = True, raises: bool = False) -> None:
        self.ready = self.status = (usable, why)
        self._fits, self._raises = fits, raises

    def judge(self, offer: pb.TransportOffer) -> tuple[bool, str]:
        if self._raises:
            raise Unavailable("it broke meanwhile")
        return self._fits, "reaches it" if self._fits else "another host"


def hello(offers: list[str], failed: dict[str, str] | None = None, unusable: dict[str, str] | None = None) -> Any:
    return pb.PeerHello(
        offers=[pb.TransportOffer(name=name) for name in offers],
        failed=[pb.TransportOffer(name=name, reason=why) for name, why in (failed or {}).items()],
        unusable=[pb.TransportOffer(name=name, reason=why) for name, why in (unusable or {}).items()],
    )


def told(found: choice.Choice) -> list[tuple[str, str, str]]:
    return [(item.name, item.code, item.reason) for item in found.candidates]


def test_the_first_of_the_destination_s_that_both_can_use() -> None:
    order: Any = {
        "verbs": Fake(False, "no RDMA device"),
        "efa": Fake(),
        "nvlink": Fake(),
        "shm": Fake(fits=False),
        "fake": Fake(raises=True),
        "tcp": Fake(),
        "last": Fake(),
    }
    found = choose(
        order,
        hello(
            ["tcp", "shm", "fake", "verbs", "last", "own"],
            failed={"nvlink": "cannot map"},
            unusable={"efa": "no EFA device", "gone": "?"},
        ),
    )
    assert found.transport is order["tcp"]
    assert told(found) == [
        ("verbs", "unusable_here", "no RDMA device"),
        ("efa", "unusable_there", "not usable at the writer: no EFA device"),
        ("nvlink", "failed", "cannot map"),
        ("shm", "mismatch", "another host"),
        ("fake", "mismatch", "it broke meanwhile"),
        ("tcp", "chosen", "reaches it"),
        ("last", "later", "reaches it"),
        ("own", "unusable_here", "the destination is not told to use it"),
        ("gone", "unusable_here", "the destination is not told to use it"),
    ]
    assert found.reason.startswith("reaches it; verbs: no RDMA device; efa: not usable at the writer")
    assert "last" not in found.reason
    assert found.code == "unusable_here"
    assert one_line(found.candidates).startswith("verbs no (no RDMA device), efa no (")
    assert "tcp yes (reaches it), last later" in one_line(found.candidates)


def test_none_in_common_names_every_reason() -> None:
    order: Any = {"shm": Fake(fits=False), "tcp": Fake()}
    with pytest.raises(FailedPrecondition) as refused:
        choose(order, hello(["shm"]))
    assert refused.value.message == "no common transport: shm: another host; tcp: not offered by the writer"


def test_the_first_needs_no_excuse() -> None:
    order: Any = {"tcp": Fake(), "shm": Fake()}
    found = choose(order, hello(["shm", "tcp"]))
    assert (found.code, found.reason) == ("first", "reaches it")


def test_a_peer_that_tells_nothing_or_nonsense() -> None:
    assert reason_code([]) == "unknown"
    assert reason_code([pb.TransportCandidate(name="x", code="anything")]) == "unknown"
    long = pb.TransportCandidate(name="n" * 500, reason="r" * 5000, code="c" * 500)
    cut = bounded([long] * 500)
    assert len(cut) == choice.MAX_CANDIDATES
    assert (len(cut[0].name), len(cut[0].reason), cut[0].code) == (
        choice.MAX_NAME_CHARS,
        choice.MAX_REASON_CHARS,
        "unknown",
    )


names = st.sampled_from(["shm", "tcp", "verbs", "efa", "x" * 100])


@given(
    st.dictionaries(names, st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=5),
    st.lists(names, max_size=16),
    st.dictionaries(names, st.text(max_size=300), max_size=5),
    st.dictionaries(names, st.text(max_size=300), max_size=5),
)
def test_one_is_chosen_or_none_can_be(
    order: dict[str, tuple[bool, bool, bool]], offers: list[str], failed: dict[str, str], unusable: dict[str, str]
) -> None:
    transports: Any = {name: Fake(usable, "w" * 300, fits, raises) for name, (usable, fits, raises) in order.items()}
    can = [
        name
        for name, (usable, fits, raises) in order.items()
        if usable and fits and not raises and name in offers and name not in failed
    ]
    if not can:
        with pytest.raises(FailedPrecondition):
            choose(transports, hello(offers, failed, unusable))
        return
    found = choose(transports, hello(offers, failed, unusable))
    assert found.transport is transports[can[0]]
    assert [item.chosen for item in found.candidates].count(True) == 1
    assert len(found.candidates) <= choice.MAX_CANDIDATES
    assert all(item.code in choice.CODES for item in found.candidates)
    assert all(len(item.reason) <= choice.MAX_REASON_CHARS + 40 for item in found.candidates)
    assert [item.usable for item in found.candidates].count(True) == len(can)
    assert found.code in choice.CODES | {choice.FIRST}
