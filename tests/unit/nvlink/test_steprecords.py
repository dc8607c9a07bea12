"""Who is told of a step's layers: nobody, or the poster's step of the record that was published last."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvmesh.engine.events import Mode, RequestKey
from kvmesh.engine.steprecords import StepRecords
from kvmesh.kv.ring import Doorbell, StepRecord, StepRing


class Poster:
    """Takes transfers with an even number."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.layers: list[int] = []

    def step(self, record: StepRecord) -> Any:
        self.records.append(record)
        ours = [entry for entry in record.entries if entry.transfer_id % 2 == 0]
        return SimpleNamespace(layer=self.layers.append) if ours else None


def planned(transfer_id: int, computed: int, tokens: int, total: int, mode: Mode = Mode.PREFILL_ONLY) -> Any:
    request = SimpleNamespace(options=SimpleNamespace(mode=mode), key=RequestKey(str(transfer_id), 1))
    choice = SimpleNamespace(
        request=request,
        computed=computed,
        ahead=0,
        tokens=SimpleNamespace(size=total),
        sent=computed // 4,
        transfer_base=0,
        transfer_id=transfer_id,
    )
    return choice, tokens, None


def test_the_runner_tells_the_posters_step() -> None:
    poster = Poster()
    ring, doorbell = StepRing(bytearray(StepRing.bytes_for(4, 4))), Doorbell(bytearray(64))
    records = StepRecords(ring, doorbell, lambda: None, 3, 4, 0.0, lambda seconds: None, poster)
    assert records.on_layer is None
    assert records.publish([planned(2, 0, 8, 20)])
    tell = records.on_layer
    assert tell is not None
    for layer in range(3):
        tell(layer)
    assert poster.layers == [0, 1, 2]
    # What the sidecar gets is the same record.
    assert ring.consume() == poster.records[0]
    assert records.publish([planned(3, 0, 8, 20)])
    assert records.on_layer is None
    # A step that completes no page, and one of another kind.
    assert records.publish([planned(2, 8, 1, 20), planned(4, 0, 8, 20, Mode.LOCAL)])
    assert records.on_layer is None
    assert len(poster.records) == 2


def test_a_record_that_was_not_published_begins_no_step() -> None:
    poster = Poster()
    ring, doorbell = StepRing(bytearray(StepRing.bytes_for(1, 1))), Doorbell(bytearray(64))
    records = StepRecords(ring, doorbell, lambda: None, 3, 4, 0.0, lambda seconds: None, poster)
    assert records.publish([planned(2, 0, 8, 20)])
    assert not records.publish([planned(2, 8, 8, 20)])
    assert records.on_layer is None
    assert len(poster.records) == 1
