"""Publishing into a ring whose other side has gone wrong."""

from __future__ import annotations

from types import SimpleNamespace

from kvmesh.engine.events import Mode, RequestKey
from kvmesh.engine.steprecords import StepRecords
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell, StepRing


def test_a_consumers_cursor_that_makes_no_sense_costs_the_sending_alone() -> None:
    memory = bytearray(4096)
    records = StepRecords(
        StepRing(memory), Doorbell(bytearray(DOORBELL_BYTES)), lambda: None, 2, 16, wait_s=1.0, sleep=lambda _: None
    )
    options = SimpleNamespace(mode=Mode.PREFILL_ONLY)
    request = SimpleNamespace(options=options, key=RequestKey("r", 0))
    choice = SimpleNamespace(
        request=request, computed=0, ahead=0, tokens=SimpleNamespace(size=16), sent=0, transfer_id=7, transfer_base=0
    )
    assert records.publish([(choice, 16, None)])  # type: ignore[list-item]
    choice.sent = 0
    words = memoryview(memory).cast("Q")
    words[8] = 1 << 40
    assert not records.publish([(choice, 16, None)])  # type: ignore[list-item]
    assert choice.sent == 0
    assert records.count == 1
