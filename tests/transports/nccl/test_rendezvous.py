from __future__ import annotations

import collections
import random

import pytest
from hypothesis import given, settings, strategies as st

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.transfer_frames import (
    DeviceDone,
    DeviceFrame,
    DeviceGrant,
    DeviceOffer,
    DeviceSkip,
    DeviceWithdraw,
)
from asynckv.transports.nccl.rendezvous import MAX_OFFERED, Receiving, Sending, Step


def receiving(operations: int = 4, max_bytes: int = 100) -> Receiving[int]:
    """One end that wants everything, as its number."""
    made = Receiving[int](operations, max_bytes, lambda offer: offer.number)
    made.is_open = True
    return made


def sending(max_bytes: int = 100) -> Sending[str]:
    return Sending[str](max_bytes)


def offer(number: int, nbytes: int = 10) -> DeviceOffer:
    return DeviceOffer(number, 0, 0, 0, nbytes)


class Model:
    """Both ends of a pipe, what is on its way between them, and what was posted."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.sender = sending(60)
        self.receiver = Receiving[int](2, 40, self.place)
        self.receiver.is_open = True
        self.there: collections.deque[DeviceFrame] = collections.deque()
        self.back: collections.deque[DeviceFrame] = collections.deque()
        self.wanted: set[str] = set()
        self.sent: list[str] = []
        self.received: list[int] = []
        self.landing: collections.deque[int] = collections.deque()
        self.over: list[str] = []
        self.count = 0

    def place(self, one: DeviceOffer) -> int | None:
        return one.number if self.chance.random() < 0.8 else None

    def offer(self) -> None:
        nbytes = self.chance.choice((1, 10, 40))
        if self.sender.may_offer(nbytes):
            name = str(self.count)
            self.there.append(self.sender.offer(name, 0, 0, 0, nbytes))
            self.count += 1

    def withdraw(self) -> None:
        void = str(self.chance.randrange(self.count + 1))
        self.there.extend(self.sender.withdraw(lambda one: one == void))

    def do(self, step: Step[int]) -> None:
        self.back.extend(step.frames)
        self.received += step.posts
        self.landing.extend(step.posts)

    def hear_there(self) -> None:
        if self.there:
            frame = self.there.popleft()
            if isinstance(frame, DeviceOffer):
                self.do(self.receiver.on_offer(frame))
            elif isinstance(frame, DeviceWithdraw):
                self.do(self.receiver.on_withdraw(frame))

    def hear_back(self) -> None:
        if not self.back:
            return
        frame = self.back.popleft()
        if isinstance(frame, DeviceGrant):
            self.sent.append(str(self.sender.on_grant(frame)))
        elif isinstance(frame, DeviceSkip):
            self.over.append(str(self.sender.on_skip(frame)))
        elif isinstance(frame, DeviceDone):
            self.over.append(str(self.sender.on_done(frame)))

    def land(self) -> None:
        # Both sides must have posted it: neither is ever first alone for long.
        if self.landing and len(self.sent) > len(self.received) - len(self.landing):
            self.do(self.receiver.on_landed(self.landing.popleft()))

    def finish(self) -> None:
        while self.there or self.back or self.landing:
            self.hear_there()
            self.hear_back()
            self.land()


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_both_sides_post_the_same_in_the_same_order(seed: int) -> None:
    model = Model(chance := random.Random(seed))
    does = (model.offer, model.hear_there, model.hear_back, model.land, model.withdraw)
    for _ in range(80):
        chance.choice(does)()
    model.finish()
    assert [int(name) for name in model.sent] == model.received
    assert sorted(map(int, model.over)) == list(range(model.count))
    assert model.sender.nbytes == model.receiver.nbytes == 0


def test_nothing_is_left_of_a_pipe_that_is_over() -> None:
    one, other = sending(), receiving()
    other.on_offer(one.offer("a", 0, 0, 0, 10))
    one.forget()
    other.forget()
    assert not one.nbytes and not other.nbytes and not other.is_open


def test_nothing_is_granted_beyond_the_slots() -> None:
    end = receiving(operations=2)
    steps = [end.on_offer(offer(number)) for number in range(3)]
    assert [step.posts for step in steps] == [[0], [1], []]
    assert end.on_landed(0) == Step([DeviceDone(0), DeviceGrant(2)], [2])


def test_nothing_is_granted_beyond_the_bytes_but_what_is_alone() -> None:
    end = receiving(max_bytes=15)
    assert end.on_offer(offer(0, 15)).posts == [0]
    assert end.on_offer(offer(1, 1)).posts == []
    assert end.nbytes == 15


def test_a_withdrawn_offer_that_waits_is_skipped() -> None:
    end = receiving(operations=1)
    end.on_offer(offer(0))
    end.on_offer(offer(1))
    assert end.on_withdraw(DeviceWithdraw(1)) == Step([DeviceSkip(1)])
    assert end.on_landed(0).posts == []


def test_what_is_granted_cannot_be_withdrawn() -> None:
    end = receiving()
    end.on_offer(offer(0))
    assert end.on_withdraw(DeviceWithdraw(0)) == Step()
    assert end.nbytes == 10


@pytest.mark.parametrize("wrong", [offer(1), offer(0, 0), offer(0, 101)])
def test_an_offer_that_cannot_be_is_refused(wrong: DeviceOffer) -> None:
    with pytest.raises(RemoteProtocolError):
        receiving().on_offer(wrong)


def test_offers_without_end_are_refused() -> None:
    end = receiving(operations=1)
    for number in range(MAX_OFFERED + 1):
        end.on_offer(offer(number))
    with pytest.raises(RemoteProtocolError, match="at a time"):
        end.on_offer(offer(MAX_OFFERED + 1))


def test_no_more_is_offered_than_the_peer_keeps() -> None:
    end = sending(max_bytes=10**6)
    for _ in range(MAX_OFFERED):
        end.offer("one", 0, 0, 0, 1)
    assert not end.may_offer(1)


def test_a_pipe_that_is_not_open_is_offered_nothing() -> None:
    end = receiving()
    end.is_open = False
    with pytest.raises(RemoteProtocolError, match="not open"):
        end.on_offer(offer(0))


@pytest.mark.parametrize(
    ("heard", "last", "why"),
    [
        ([DeviceGrant(0)], DeviceGrant(0), "out of order"),
        ([DeviceGrant(0)], DeviceGrant(2), "out of order"),
        ([DeviceGrant(1)], DeviceGrant(0), "out of order"),
        ([DeviceGrant(0)], DeviceSkip(0), "not offered"),
    ],
    ids=["twice", "never offered", "overtaken", "skipped when granted"],
)
def test_what_was_offered_is_granted_once_and_in_order(
    heard: list[DeviceGrant], last: DeviceGrant | DeviceSkip, why: str
) -> None:
    end = sending()
    for name in ("a", "b"):
        end.offer(name, 0, 0, 0, 1)
    assert [end.on_grant(frame) for frame in heard] == ["ab"[heard[0].number]]
    with pytest.raises(RemoteProtocolError, match=why):
        if isinstance(last, DeviceSkip):
            end.on_skip(last)
        else:
            end.on_grant(last)


def test_what_is_done_is_the_oldest_that_was_granted() -> None:
    end = sending()
    for number, name in enumerate(("a", "b")):
        end.offer(name, 0, 0, 0, 1)
        end.on_grant(DeviceGrant(number))
    with pytest.raises(RemoteProtocolError, match="out of order"):
        end.on_done(DeviceDone(1))
    assert end.on_done(DeviceDone(0)) == "a"
