"""Credits and the mailbox, without any device."""

from __future__ import annotations

import random

import pytest

from kvmesh.errors import DataLoss, Internal, InvalidArgument
from kvmesh.transfer.transports.verbs.credits import CREDIT_WORDS, ReceiveCredits, SendCredits
from kvmesh.transfer.transports.verbs.mailbox import MAX_RUN_BYTES, Mailbox
from kvmesh.transfer.transports.verbs.qp import KIND_WORD, request_id


@pytest.mark.parametrize(("depth", "receives"), [(2, 2), (8, 2), (8, 3), (64, 5), (4, 32), (257, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_overflows_whoever_is_slow(depth: int, receives: int, seed: int) -> None:
    """A model of the wire beside the accounts: whatever order things happen in, no queue exceeds its depth, every entry
    is read before it is written again, and neither end gets stuck."""
    draw = random.Random(seed)
    send, receive = SendCredits(depth, receives), ReceiveCredits(receives)
    in_flight: list[tuple[int, int]] = []
    unread: list[int] = []
    completions: list[int] = []
    posted = receives
    words: list[int] = []
    word_receives = CREDIT_WORDS
    requests = 0
    done = 0
    for _ in range(4000):
        action = draw.randrange(6)
        if action == 0 and send.room:
            size = draw.randint(2, send.room)
            run = send.take(size)
            requests += size
            assert requests <= depth, "the send queue overflows"
            in_flight.append((run, size))
        elif action == 1 and in_flight:
            run, size = in_flight.pop(0)
            assert posted > 0, "the peer's receive queue is empty"
            posted -= 1
            assert run % receives not in [other % receives for other in unread], (
                "an entry is written before it was read"
            )
            unread.append(run)
            completions.append(size)
        elif action == 2 and completions:
            requests -= completions.pop(0)
            send.completed(done)
            done += 1
        elif action == 3 and (unread or receive.missing):
            if unread:
                assert receive.consumed() == unread.pop(0)
            if draw.random() < 0.7:
                posted += receive.missing
                receive.reposted(receive.missing)
        elif action == 4:
            word = receive.due()
            if word is not None:
                receive.telling()
                words.append(word)
                word_receives -= 1
                assert word_receives >= 0, "the writer's receive queue overflows"
                receive.told()
        elif action == 5 and words:
            send.returned(words.pop(0))
            word_receives += 1
        assert posted <= receives
    assert done > 100, "stuck"


def test_what_a_peer_cannot_have_done_is_refused() -> None:
    send = SendCredits(8, 4)
    with pytest.raises(Internal):
        send.take(9)
    for _ in range(4):
        send.take(2)
    assert send.room == 0
    with pytest.raises(DataLoss, match="run 1 completed where run 0"):
        send.completed(1)
    with pytest.raises(DataLoss, match="returns 5 receives, 4 at most"):
        send.returned(4 + 5)
    with pytest.raises(DataLoss):
        send.returned(3)
    send.returned(6)
    assert send.room == 0
    send.completed(0)
    assert send.room == 2
    receive = ReceiveCredits(2)
    receive.consumed()
    receive.consumed()
    with pytest.raises(DataLoss, match="not posted"):
        receive.consumed()
    with pytest.raises(Internal):
        receive.reposted(3)
    with pytest.raises(DataLoss):
        receive.told()


def test_words_wrap_at_32_bits() -> None:
    send = SendCredits(1 << 10, 4)
    receive = ReceiveCredits(4)
    base = (1 << 32) - 6
    send._granted += base
    send._started += base
    send._completed += base
    receive._posted += base
    receive._told += base
    receive._consumed += base
    for run in range(base, base + 40):
        while not send.room:
            word = receive.due()
            assert word is not None
            assert word < 1 << 32
            receive.telling()
            receive.told()
            send.returned(word)
        assert send.take(2) == run
        send.completed(run)
        receive.consumed()
        receive.reposted(receive.missing)


def test_credits_are_not_told_for_ever_one_by_one() -> None:
    """A word for half the receives, and none while too many are on their way."""
    receive = ReceiveCredits(8)
    told = 0
    for _ in range(80):
        receive.consumed()
        receive.reposted(1)
        if receive.due() is not None:
            receive.telling()
            receive.told()
            told += 1
    assert told == 20
    stuck = ReceiveCredits(2)
    for _ in range(20):
        stuck.consumed()
        stuck.reposted(1)
        if stuck.due() is not None:
            stuck.telling()
    assert stuck.due() is None


def test_mailbox_entries() -> None:
    box = Mailbox(2, 4)
    assert box.put(1, 6, 4096) == box.entry_address(1, 6) == box.ring_address(1) + 2 * 8
    assert box.put(0, 2, 77) == box.ring_address(0) + 2 * 8
    assert box.sink == box.ring_address(1) + 4 * 8
    assert box.take(1, 6) == 4096
    with pytest.raises(DataLoss, match="run 6 of queue pair 1 says 0 bytes"):
        box.take(1, 6)
    assert box.take(0, 2) == 77
    box.put(0, 0, MAX_RUN_BYTES + 1)
    with pytest.raises(DataLoss):
        box.take(0, 0)
    box.close()
    box.close()
    with pytest.raises(InvalidArgument):
        Mailbox(0, 4)


def test_request_numbers_hold_their_parts() -> None:
    number = request_id(KIND_WORD, 15, (1 << 56) - 1)
    assert number < 1 << 64
    assert (number & 3, number >> 2 & 63, number >> 8) == (KIND_WORD, 15, (1 << 56) - 1)
