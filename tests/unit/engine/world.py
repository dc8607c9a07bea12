"""An engine core over the scripted runner, with a pretended service, peer and sidecar, driven step by step.

Every action may be called at any time. The peer writes garbage into pages right up to the moment at which it says that
it has drained, and the sidecar reads pages right up to release: whoever hands pages over too early is found out by the
runner's own check of KV bytes, or by the sidecar's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvmesh.engine.core import (
    Admitted,
    CoreEvent,
    Ended,
    EngineConfig,
    EngineCore,
    EngineRequest,
    FinishReason,
    Mode,
    PrefillComputed,
    PromptScored,
    RequestKey,
    StepDone,
    Tokens,
)
from kvmesh.engine.runner import SamplingParams, StepBatch
from kvmesh.engine.scripted import ScriptedModel, ScriptedRunner, scripted_output
from kvmesh.engine.scripted_kv import ScriptedKv
from kvmesh.errors import Cancelled, FailedPrecondition, KvmeshError
from kvmesh.grammar.match import Match
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell, StepRecord, StepRing
from tests.unit.engine.async_runner import AsyncScripted

BASES = [bytes((7 * i + 3 * base) % 90 + 33 for i in range(200)) for base in range(3)]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Track:
    """What the outside knows of one request."""

    request: EngineRequest
    # At its beginning.
    grammar: Match | None = None
    outputs: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)
    aborted_choices: set[int] = field(default_factory=set)
    admitted: list[Admitted] = field(default_factory=list)
    ends: list[Ended] = field(default_factory=list)
    scored: list[PromptScored] = field(default_factory=list)
    computed: list[PrefillComputed] = field(default_factory=list)
    # REMOTE
    asked_here: bool = False
    generation: int | None = None
    draining: bool = False
    exposed_pages: list[int] = field(default_factory=list)
    # PREFILL_ONLY
    transfer_id: int | None = None
    base: int = 0
    arrived: set[int] = field(default_factory=set)
    released: bool = False
    # Released while the step that computes it to its end may have been in flight.
    cut: bool = False

    @property
    def over(self) -> bool:
        return bool(self.ends)


class World:
    def __init__(
        self,
        *,
        num_pages: int = 24,
        page_size: int = 4,
        model: ScriptedModel | None = None,
        ring_records: int = 64,
        threaded: bool = False,
        soon: Callable[[], bool] | None = None,
        **config: object,
    ) -> None:
        self.clock = Clock()
        self.fail_next: list[Exception] = []
        self.batches: list[StepBatch] = []
        self.failures: list[KvmeshError] = []
        model = model or ScriptedModel(layers=2, kv_heads=1, head_dim=8)
        # With `soon` the runner is one of its own pace (see AsyncScripted).
        self.runner: ScriptedRunner = (
            ScriptedRunner(model, before_step=self._before)
            if soon is None
            else AsyncScripted(model, before_step=self._before, soon=soon)
        )
        self.layout = self.runner.layout(page_size, num_pages)
        region = memoryview(bytearray(self.layout.region_bytes("kv")))
        self.doorbell = Doorbell(bytearray(DOORBELL_BYTES))
        self.runner.bind(self.layout, {"kv": region}, self.doorbell)
        ring_buffer = bytearray(StepRing.bytes_for(ring_records, 8))
        self.ring = StepRing(ring_buffer)
        self.sidecar_ring = StepRing(ring_buffer)
        self.peer = ScriptedKv(self.layout, {"kv": region})
        self._bytes = np.frombuffer(region, np.uint8).reshape(self.layout.num_layers, num_pages, -1)
        self.notified = 0
        self.records: list[StepRecord] = []
        settings = {"max_model_len": 120, "check_integrity": True, "ring_wait_s": 0.0, **config}
        self.core = EngineCore(
            self.runner,
            self.layout,
            EngineConfig(**settings),  # type: ignore[arg-type]
            self._on_events,
            doorbell=self.doorbell,
            ring=self.ring,
            notify=self._notify,
            on_failed=self.failures.append,
            **({} if threaded else {"clock": self.clock}),  # type: ignore[arg-type]
        )
        if isinstance(self.runner, AsyncScripted):
            self.runner.while_waiting = self._check_in_flight
        self.log: list[CoreEvent] = []
        self.tracks: dict[RequestKey, Track] = {}
        self.serial = 0
        self.cached: set[bytes] = set()

    # -- actions

    def submit(
        self,
        mode: Mode = Mode.LOCAL,
        *,
        base: int = 0,
        length: int = 10,
        tail: int = 0,
        n: int = 1,
        priority: int = 0,
        ttft: float | None = None,
        total: float | None = None,
        cumulative: bool = False,
        local_remainder: int = 0,
        first_choice: int = 0,
        grammar: Match | None = None,
        **sampling: object,
    ) -> RequestKey:
        self.serial += 1
        key = RequestKey(f"r{self.serial}", 0)
        params = SamplingParams(**{"max_tokens": 8, "seed": self.serial, **sampling})  # type: ignore[arg-type]
        prompt = list(BASES[base][:length])
        tokens = list(prompt)
        if grammar is not None:
            grammar = grammar.begin((), params.stop_token_ids, params.ignore_eos)
        if tail:
            limits = {"max_model_len": self.max_len, "grammar": grammar}
            tokens += scripted_output(prompt, params, first_choice, **limits)[0][:tail]  # type: ignore[arg-type]
        now = self.core._clock()
        request = EngineRequest(
            key,
            tokens,
            len(prompt),
            params,
            n=n,
            mode=mode,
            seed_bytes=b"seed",
            priority=priority,
            arrival=now,
            want_cumulative_logprob=cumulative,
            ttft_deadline=None if ttft is None else now + ttft,
            total_deadline=None if total is None else now + total,
            first_choice=first_choice,
            local_remainder=local_remainder,
            grammar=grammar and grammar.begin(tokens[len(prompt) :], params.stop_token_ids, params.ignore_eos),
        )
        self.tracks[key] = Track(request, grammar)
        self.core.submit(request)
        return key

    def step(self) -> bool:
        ran = self.core.step_once()
        self._serve_ring()
        return ran

    def run(self, limit: int = 10_000) -> None:
        """Until nothing can be done without the service."""
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("the engine never comes to rest")

    def abort(self, key: RequestKey, choices: set[int] | None = None) -> None:
        if choices is not None:
            self.tracks[key].aborted_choices |= choices
        self.core.abort(key, choices)

    def expose(self, key: RequestKey) -> bool:
        """False: the core says no, and nothing leaves."""
        track = self.tracks[key]
        self.serial += 1
        try:
            self.core.expose(key, self.serial)
        except (Cancelled, FailedPrecondition):
            return False
        admitted = track.admitted[-1]
        upto = self.layout.pages_for(admitted.num_tokens - 1)
        track.generation, track.draining = self.serial, False
        track.exposed_pages = list(admitted.pages[admitted.first_block : upto])
        return True

    def deliver(self, key: RequestKey) -> None:
        """The peer writes everything and the slot completes."""
        track = self.tracks[key]
        assert track.generation is not None
        admitted = track.admitted[-1]
        tokens = admitted.resumed_token_ids or track.request.token_ids
        start = admitted.first_block * self.layout.page_size
        values = np.array(tokens[start : admitted.num_tokens - 1], np.int32)
        self._garbage(track.exposed_pages)
        for layer in range(self.layout.num_layers):
            self.peer.write(layer, np.array(admitted.pages, np.int32), start, values)
        generation, track.generation = track.generation, None
        self.core.kv_ready(key, generation)

    def give_up(self, key: RequestKey) -> None:
        track = self.tracks[key]
        assert track.generation is not None
        track.draining = True
        self.core.kv_draining(key, track.generation)

    def drained(self, key: RequestKey) -> None:
        """The last garbage lands, then nothing more."""
        track = self.tracks[key]
        assert track.generation is not None
        self._garbage(track.exposed_pages)
        generation, track.generation = track.generation, None
        self.core.kv_drained(key, generation)

    def prefill_here(self, key: RequestKey) -> None:
        self.tracks[key].asked_here = True
        self.core.prefill_here(key)

    def start_prefill(self, key: RequestKey, base: int = 0) -> None:
        track = self.tracks[key]
        self.serial += 1
        track.transfer_id, track.base = self.serial, base
        track.arrived = set(range(max(0, track.admitted[0].first_block - base)))
        self.core.start_prefill(key, track.transfer_id, base)

    def release(self, key: RequestKey) -> None:
        """The sidecar reads one last time, then lets go."""
        track = self.tracks[key]
        if track.transfer_id is not None:
            self._check_sent(track, track.arrived)
        track.released, track.cut = True, not track.computed
        self.core.release(key)

    # -- where requests are

    def keys(self, state: str) -> list[RequestKey]:
        """Keys by what the service knows, in order."""
        return [key for key, track in self.tracks.items() if state in self._states(track)]

    def _states(self, track: Track) -> set[str]:
        states = set() if track.over else {"live"}
        mode = track.request.mode
        if mode is Mode.REMOTE and track.admitted and track.admitted[-1].awaiting:
            if track.generation is not None:
                states.add("draining" if track.draining else "exposed")
            if not track.over and not track.asked_here:
                states.add("remote")
        if mode is Mode.PREFILL_ONLY and track.admitted and not track.released:
            states.add("started" if track.transfer_id is not None else "admitted")
        return states

    def finish(self) -> None:
        """Bring everything to its end and check what must then be true."""
        self.run()
        for _ in range(200):
            for key in self.keys("exposed") + self.keys("draining"):
                self.drained(key)
            for key in self.keys("remote"):
                self.prefill_here(key)
            for key in self.keys("admitted"):
                self.start_prefill(key)
            self.run()
            for key in self.keys("started"):
                self.release(key)
            self.run()
            if not self.core.scheduler.requests and not self.core.scheduler.lingering:
                break
        self.check_end()

    def check_end(self) -> None:
        for track in self.tracks.values():
            assert len(track.ends) == 1, track
            self.check_output(track)
        assert self.runner.foreign == 0
        self.check_pages_back()

    def check_pages_back(self) -> None:
        core = self.core
        assert not core.scheduler.lingering
        assert not core.scheduler.queue
        assert not core.scheduler.running
        if core.cache is not None:
            core.cache.clear()
            assert len(core.cache) == 0
        core.pool.check_integrity()
        assert core.pool.counts() == (core.pool.total, 0, 0, 0)

    def check_output(self, track: Track) -> None:
        request = track.request
        error = track.ends[0].error
        if request.mode is Mode.PREFILL_ONLY:
            if error is None:
                assert len(track.computed) == 1
                pages = self.layout.pages_for(len(request.token_ids))
                assert track.cut or track.arrived == set(range(max(0, pages - track.base)))
            return
        for choice in range(request.first_choice, request.first_choice + request.n):
            tail = len(request.token_ids) - request.prompt_len
            output = track.outputs.get(choice, [])
            whole, stopped = scripted_output(
                request.token_ids[: request.prompt_len],
                request.sampling,
                choice,
                max_model_len=self.max_len,
                eos_after=self.runner.model.eos_after,
                grammar=track.grammar,
            )
            assert output == whole[tail : tail + len(output)]
            if error is None and choice not in track.aborted_choices:
                assert len(output) == len(whole) - tail
                assert track.finished[choice] is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        if request.sampling.prompt_logprobs is not None and len(request.token_ids) > request.prompt_len:
            assert not track.scored
        elif track.outputs and request.sampling.prompt_logprobs is not None:
            assert len(track.scored) == 1
            assert [s.token_id for s in track.scored[0].logprobs] == request.token_ids[1 : request.prompt_len]
        if error is None:
            assert track.ends[0].usage.completion_tokens >= sum(map(len, track.outputs.values()))

    @property
    def max_len(self) -> int:
        return min(self.core.config.max_model_len, self.layout.num_pages * self.layout.page_size)

    # -- the outside's reactions

    def _on_events(self, events: list[CoreEvent]) -> None:
        self.log += [event for event in events if not isinstance(event, StepDone)]
        for event in events:
            if isinstance(event, StepDone):
                continue
            track = self.tracks[event.key]
            assert not track.over, f"{event} after the end"
            if isinstance(event, Tokens):
                tail = len(track.request.token_ids) - track.request.prompt_len
                output = track.outputs.setdefault(event.choice, [])
                assert event.first_position == tail + len(output), "a token came twice or was skipped"
                assert event.choice not in track.finished
                output.extend(event.token_ids)
                if event.finish_reason is not None:
                    track.finished[event.choice] = event.finish_reason
            elif isinstance(event, Admitted):
                track.admitted.append(event)
                track.asked_here = False  # what was asked before is forgotten with the pages
            elif isinstance(event, Ended):
                track.ends.append(event)
            elif isinstance(event, PromptScored):
                assert not track.outputs
                track.scored.append(event)
            else:
                track.computed.append(event)

    @property
    def device(self) -> AsyncScripted:
        assert isinstance(self.runner, AsyncScripted)
        return self.runner

    def _check_in_flight(self) -> None:
        """What a launched step writes and copies is its own until it was collected, and no peer may write it."""
        pool, size = self.core.pool, self.layout.page_size
        if self.core.config.check_integrity:
            pool.check_integrity()
        for flight in self.device.flights:
            for part in flight.batch.slices:
                written = range(part.start // size, (part.start + len(part.token_ids) - 1) // size + 1)
                for page in part.block_table[list(written)].tolist():
                    assert pool.holds(part.seq_id, page)
                    assert not pool.being_written(page)
            for src, dst in flight.batch.copies:
                assert pool.refcount(src) > 0
                assert pool.refcount(dst) > 0

    def _before(self, batch: StepBatch) -> None:
        self.batches.append(batch)
        if self.fail_next:
            raise self.fail_next.pop()

    def _notify(self) -> None:
        self.notified += 1

    def _serve_ring(self) -> None:
        """The sidecar: pages of a record leave as soon as the doorbell says so, however late that is, each once."""
        while (record := self.sidecar_ring.consume()) is not None:
            self.records.append(record)
        due = [r for r in self.records if self.doorbell.value >= r.first_value + r.num_layers - 1]
        self.records = [r for r in self.records if r not in due]
        by_id = {t.transfer_id: t for t in self.tracks.values() if t.transfer_id is not None and not t.released}
        for record in due:
            for entry in record.entries:
                track = by_id.get(entry.transfer_id)
                if track is None:
                    continue
                pages = set(range(entry.first_page, entry.first_page + entry.num_pages))
                assert not pages & track.arrived, "a page was recorded twice"
                track.arrived |= pages
                self._check_sent(track, pages)

    def _check_sent(self, track: Track, pages: set[int]) -> None:
        """The bytes that the sidecar reads are those of the request's own tokens."""
        size = self.layout.page_size
        tokens = np.array(track.request.token_ids, np.int32)
        table = np.array(track.admitted[0].pages, np.int32)
        for page in pages:
            first = (page + track.base) * size
            wrong = self.peer.wrong_positions(table, first, min(first + size, len(tokens)), tokens)
            assert not len(wrong), f"page {page} of {track.request.key} was sent with wrong bytes"

    def _garbage(self, pages: list[int]) -> None:
        for page in pages:
            self._bytes[:, page] = 0xA5


def error_of(track: Track) -> KvmeshError | None:
    return track.ends[0].error
