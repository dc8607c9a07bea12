"""One flight as one gateway sees it: the log, who reads it here, and where its output comes from.

    LEAD    a generation runs here; the lease is renewed, and frames are written while gateways follow
    FOLLOW  frames are read; when the leader is gone, one follower's gateway takes over: LEAD, from where they end
    ALONE   a generation runs here and nobody elsewhere hears of it: the lease was lost, or Redis was
    OVER    nothing runs here any more

Readers do not notice which of them it is: they read the log, and it only ever grows by what follows on it. Whoever
produces is never waited for by a reader, never waits for one, and does not belong to any: a generation goes on while
anybody reads, here or elsewhere, and ends at once when nobody does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvmesh.errors import Cancelled, DeadlineExceeded, Internal, KvmeshError, Unavailable
from kvmesh.proto.v1 import router_pb2
from kvmesh.rpc.status import is_retryable
from kvmesh.rpc.tasks import BackgroundTasks
from kvmesh.store.flights import FlightRef, FlightStore, Frames, How
from services.gateway.flights.log import FlightLog
from services.gateway.flights.mirror import Mirror
from services.gateway.flights.parts import Kin, Member, Pace, Produce, Role, count, joining
from services.gateway.flights.publisher import Publisher

log = logging.getLogger(__name__)

MAX_ROUNDS = 2
"""Further generations begun here after one has failed."""

RETRY_S = 0.25


class Flight:
    """See the module. `choices`: output choices of the request. `on_over` is called once, when nothing is left."""

    def __init__(
        self,
        ref: FlightRef,
        token: int,
        leader: str,
        *,
        choices: int,
        store: FlightStore,
        tasks: BackgroundTasks,
        pace: Pace,
        on_over: Callable[[Flight], None],
    ) -> None:
        self.ref = ref
        self.role = Role.FOLLOW
        self.log = FlightLog(choices)
        self._token = token
        self._leader = leader
        self._store = store
        self._tasks = tasks
        self._pace = pace
        self._on_over = on_over
        self._members: list[Member] = []
        self._mirror = Mirror(self.log)
        self._followers = 0
        self._joined_at = -1e9
        self._hand_over: KvmeshError | None = None
        self._how: How = "failed"
        self._rounds = 0
        self._closing = False
        self._kin = Kin()
        self._generation: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    # --- members
    def lead(self, member: Member) -> None:
        """The router made this gateway the leader, for the request of `member`."""
        self.role = Role.LEAD
        count("lead")
        self._generate(member)
        self._keeper = self._tasks.spawn(self._keep(), name="flight", essential=False)

    def follow(self) -> None:
        """Another gateway leads."""
        count("follow")
        self._keeper = self._tasks.spawn(self._keep(), name="flight", essential=False)

    def join(
        self,
        produce: Produce,
        *,
        max_tokens: int | None = None,
        max_bytes: int | None = None,
        on_slow: Callable[[KvmeshError], None] | None = None,
    ) -> Member:
        """One more reader, from the first token on. The limits are `FlightLog.reader`'s."""
        member = Member(produce, self.log.reader(max_tokens=max_tokens, max_bytes=max_bytes, on_slow=on_slow))
        self._members.append(member)
        self._kin.followed_by(member.span.get_span_context())
        return member

    def leave(self, member: Member) -> None:
        """A reader has gone. Idempotent."""
        member.reader.close()
        if member in self._members:
            self._members.remove(member)
            if not self._members:
                self._deserted()

    def __len__(self) -> int:
        return len(self._members)

    def _deserted(self) -> None:
        """Nobody reads here any more."""
        if self.log.ended or self.role is Role.OVER:
            return
        if self.role is Role.LEAD and self._followers and not self._closing:
            log.info("flight %s goes on for %d other gateway(s)", self.ref.flight_id, self._followers)
            return
        self._stop(Unavailable("its gateway is stopping") if self._closing else Cancelled("everybody has left"))

    def _stop(self, why: KvmeshError) -> None:
        """End the generation here; who may still want it elsewhere takes over."""
        if self.role is Role.LEAD:
            self._hand_over, self._how = why, "handed"
        self.log.fail(why)
        self._abort()
        self._wake.set()

    def _abort(self) -> None:
        if self._generation is not None:
            self._generation.cancel()

    # --- from the hub
    def joined(self, traceparent: str = "") -> None:
        """A gateway tells that it follows, for the request of that trace."""
        self._kin.followed_by(traceparent)
        self._joined_at = self._loop.time()
        self._followers = max(1, self._followers)
        self._wake.set()

    @property
    def place(self) -> str:
        """Of the last frame read."""
        return self._mirror.place

    def frames(self, place: str, read: Frames) -> None:
        """Frames that came after `place`."""
        if self.role is Role.FOLLOW and self._mirror.read(place, read, self._loop.time()):
            self._wake.set()

    def close(self) -> None:
        """This gateway is stopping: whatever it leads and nobody here reads is handed over now, the rest when they
        have left."""
        self._closing = True
        if not self._members:
            self._deserted()
        self._wake.set()

    async def closed(self) -> None:
        """Until nothing of it is left."""
        if self._keeper is not None:
            await asyncio.wait([self._keeper])

    # --- the generation
    def _generate(self, member: Member) -> None:
        self._kin.leads(member.span)
        self._generation = self._tasks.spawn(self._produce(member), name="flight-generation", essential=False)

    async def _produce(self, member: Member) -> None:
        flight = None
        if self.role is Role.LEAD:
            flight = router_pb2.Flight(
                flight_id=self.ref.flight_id,
                gateway_id=self._store.gateway_id,
                token=self._token,
                key=self.ref.keys.key,
            )
        try:
            finished = await member.produce(self.log, flight)
        except KvmeshError as error:
            self._failed(error, member)
        except Exception as exc:
            log.exception("flight %s failed", self.ref.flight_id)
            self._failed(Internal(f"internal error ({type(exc).__name__})"), member)
        else:
            self.log.finish(finished)
        finally:
            self._wake.set()

    def _failed(self, error: KvmeshError, owner: Member) -> None:
        """The generation failed: what may succeed when another request asks is tried by one, here or elsewhere."""
        # Limits and cancellation are the owner's own matter, not that of those who follow.
        again = is_retryable(error) or isinstance(error, DeadlineExceeded | Cancelled)
        others = [member for member in self._members if member is not owner]
        self._rounds += 1
        if again and not self._closing and self._rounds <= MAX_ROUNDS:
            if others:
                log.warning("flight %s begins again with another request: %s", self.ref.flight_id, error.message)
                count("again")
                owner.reader.cut(error)
                self.leave(owner)
                self._generate(others[0])
                return
            if self.role is Role.LEAD and self._followers:
                self._hand_over, self._how = error, "free"
        self.log.fail(error)

    # --- keeping
    async def _keep(self) -> None:
        try:
            if self.role is Role.FOLLOW:
                await self._keep_following()
            if self.role is Role.LEAD:
                await self._keep_leading(begun=self._mirror.heard)
            while self.role is Role.ALONE and not self.log.ended:
                await self._pause(None)
        except Exception as exc:
            # Without a keeper nothing may run on unseen.
            self.log.fail(Internal(f"internal error ({type(exc).__name__})"))
            raise
        finally:
            self.role = Role.OVER
            self._abort()
            self._on_over(self)

    async def _pause(self, timeout_s: float | None) -> None:
        """Until `_wake`, or so long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _keep_leading(self, *, begun: bool) -> None:
        publisher = Publisher(self._store, self.ref, self._token, self.log, begun=begun)
        publisher.reader.wakes(self._wake)
        # The router's own pointer holds for a lease from the decision on.
        heard = self._loop.time()
        due = heard if begun else heard + self._pace.renew_s
        renewed = False
        while not self.log.ended:
            now = self._loop.time()
            if now >= due or (self._followers and not renewed):
                answer = await self._store.renew(self.ref, self._token)
                now = self._loop.time()
                due = now + (self._pace.renew_s if answer is not None else RETRY_S)
                if answer is not None:
                    if not answer.held:
                        self._lost()
                        return
                    heard, renewed = now, True
                    # It shows itself a moment after it has told us.
                    fresh = now - self._joined_at < self._pace.renew_s
                    self._followers = max(answer.followers, int(fresh))
                elif now - heard > self._pace.give_up_s:
                    # Nobody can have followed for so long.
                    self._followers = 0
                if not self._followers and not self._members and not self.log.ended:
                    self._deserted()
                    break
            if self._followers and renewed:
                publisher.greet()
                said = await publisher.publish()
                if said == "lost":
                    self._lost()
                    return
                if said != "ok":
                    due = min(due, self._loop.time() + RETRY_S)
                publisher.reader.attach()
                # What comes meanwhile goes out together.
                await asyncio.sleep(self._pace.publish_s)
                if publisher.reader.behind and said == "ok":
                    continue
            else:
                publisher.reader.close()
            if not self.log.ended:
                await self._pause(max(0.0, due - self._loop.time()))
        publisher.reader.close()
        await self._end(publisher)

    async def _end(self, publisher: Publisher) -> None:
        """The log has ended: tell those who follow, and stay a while for those who are only about to."""
        until = self._loop.time() + self._pace.linger_s
        finished, error = self.log.finished, self.log.error
        told = False
        while self._loop.time() < until:
            if error is not None:
                if await publisher.fail(self._hand_over or error, self._how, followed=self._followers > 0):
                    return
            elif finished is not None and not told and (self._followers or publisher.begun):
                told = await publisher.finish(finished)
            if finished is not None and self._closing and not self._members:
                return
            left = until - self._loop.time()
            await self._pause(left if finished is not None and (told or not self._followers) else min(RETRY_S, left))

    def _lost(self) -> None:
        """Another gateway leads, or the flight has ended elsewhere: this one's own readers are served all the same."""
        log.warning("flight %s has been taken over", self.ref.flight_id)
        count("lost")
        self._followers = 0
        self.role = Role.ALONE
        if not self._members:
            self._deserted()

    async def _keep_following(self) -> None:
        began = heard = self._loop.time()
        told_again = False
        await self._store.join(self.ref, self._leader, joining(self._members))
        while not self.log.ended:
            held = await self._store.keep(self.ref)
            now = self._loop.time()
            if self.log.ended:
                break
            if held is not None:
                heard = now
                self._token = max(self._token, held.token)
                if held.standing == "free":
                    if await self._take_over():
                        return
                    continue
                if held.standing == "ended":
                    await self._read_on()
                    # What it ended with should be there: nobody will tell us more.
                    self._mirror.broken = not self.log.ended
                elif held.standing == "led" and held.gateway != self._leader:
                    self._leader, began, told_again = held.gateway, now, False
                    await self._store.join(self.ref, self._leader, joining(self._members))
            silent = now - began if not self._mirror.heard else 0.0
            if self._mirror.broken or now - heard > self._pace.give_up_s or silent > self._pace.silence_s:
                await self._alone()
                return
            if self._mirror.heard and now - self._mirror.read_at > self._pace.silence_s:
                # Maybe nothing has come; or another Redis has taken over, whose clock is behind, and numbers anew.
                self._mirror.rewind()
                self._mirror.read_at = now
            if silent > self._pace.silence_s / 2 and not told_again:
                told_again = True
                await self._store.join(self.ref, self._leader, joining(self._members))
            if not self.log.ended and not self._mirror.broken:
                await self._pause(self._pace.renew_s if held is not None else RETRY_S)
        await self._store.leave(self.ref)

    async def _take_over(self) -> bool:
        """Try to lead. True when the role has changed, or the flight has ended."""
        held = await self._store.take_over(self.ref, self._token)
        if held is None:
            await self._pause(RETRY_S)
            return False
        self._token = max(self._token, held.token)
        if held.standing == "taken":
            whole = await self._read_on()
            if self._members and not self.log.ended:
                self.role = Role.LEAD
                if not whole or self._mirror.broken:
                    # We cannot go on from what the others have; they would have to do the same.
                    await self._alone()
                    return True
                log.warning("flight %s is taken over from %s", self.ref.flight_id, self._leader)
                count("takeover")
                self._generate(self._members[0])
                return True
            # Its end was in the frames, or everybody left meanwhile.
            await self._store.end(self.ref, held.token, "handed" if self.log.finished is None else "finished")
            return True
        if held.standing in ("ended", "spent"):
            await self._read_on()
            if held.standing == "spent" or self._mirror.error is not None:
                self.log.fail(self._mirror.error or Unavailable("the gateways that led this answer are gone"))
            elif not self.log.ended:
                self._mirror.broken = True
        return self.log.ended

    async def _read_on(self) -> bool:
        """Read all frames that there are, from the first on, to be sure. False when that is not possible now."""
        self._mirror.rewind()
        while not self.log.ended:
            place = self.place
            read = await self._store.read({self.ref: place})
            if read is None:
                return False
            self.frames(place, read[self.ref])
            if self._mirror.broken:
                return False
            if not read[self.ref].frames and place == self.place:
                return True
        return True

    async def _alone(self) -> None:
        """Neither to follow nor to lead: the text so far is here, and a worker can go on from it."""
        if self.log.ended:
            return
        log.warning("flight %s goes on without the others", self.ref.flight_id)
        count("alone")
        self.role = Role.ALONE
        await self._store.leave(self.ref)
        if self._members and not self.log.ended:
            self._generate(self._members[0])
        elif not self.log.ended:
            self._deserted()
