from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asynckv.errors import EndOfStream, PeerLost, PipeBroken, RemoteProtocolError
from asynckv.pipes.outbound import MAX_TENSORS, Credit, Outbound, Parcel, SendRoom
from asynckv.protocol.codec import Buffer
from asynckv.protocol.frames import Frame, Push
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.testing import until_blocked
from asynckv.transfers.source import HostSource
from asynckv.types import TensorSpec


def test_none_has_no_bytes() -> None:
    assert Parcel(None).nbytes == 0
    assert Parcel(TensorSpec((2, 3), "float32")).nbytes == 24


async def test_who_was_cancelled_is_not_woken() -> None:
    parcel, loop = Parcel(None), asyncio.get_running_loop()
    parcel.wake()
    parcel.turn = loop.create_future()
    parcel.watchers = [loop.create_future(), loop.create_future()]
    parcel.turn.cancel()
    parcel.watchers[0].cancel()
    parcel.wake()
    parcel.settle(is_verified=True)
    parcel.settle(is_verified=False)
    assert parcel.watchers[1].result() is True


def _parcel(nbytes: int) -> Parcel:
    return Parcel(TensorSpec((nbytes,), "uint8"))


async def test_room_is_given_in_the_order_of_the_calls() -> None:
    admitted: list[Parcel] = []
    room = SendRoom(10, admitted.append)
    parcels = [_parcel(nbytes) for nbytes in (6, 6, 1)]
    tasks = [asyncio.create_task(room.wait_for(parcel)) for parcel in parcels]
    await until_blocked(*tasks)
    assert (admitted, len(room), room.waits) == (parcels[:1], 2, 2)
    room.release(parcels[0])
    room.advance()
    await asyncio.gather(*tasks)
    assert (admitted, room.used_bytes, room.used_tensors) == (parcels, 7, 2)


async def test_what_is_above_the_bound_goes_alone() -> None:
    room = SendRoom(10, lambda parcel: None)
    await room.wait_for(_parcel(11))
    small = asyncio.create_task(room.wait_for(_parcel(1)))
    await until_blocked(small)
    room.release(_parcel(11))
    room.advance()
    await small


async def test_who_leaves_the_line_is_not_admitted() -> None:
    admitted: list[Parcel] = []
    room = SendRoom(10, admitted.append)
    parcels = [_parcel(10) for _ in range(3)]
    tasks = [asyncio.create_task(room.wait_for(parcel)) for parcel in parcels]
    await until_blocked(*tasks)
    tasks[1].cancel()
    room.quit(parcels[1])
    room.quit(parcels[1])
    room.release(parcels[0])
    room.advance()
    await tasks[2]
    assert admitted == [parcels[0], parcels[2]]


async def test_a_closed_room_wakes_all_and_admits_nobody() -> None:
    room = SendRoom(10, lambda parcel: None)
    await room.wait_for(first := _parcel(10))
    late = _parcel(1)
    waiting = asyncio.create_task(room.wait_for(late))
    await until_blocked(waiting)
    room.close()
    await waiting
    room.release(first)
    await room.wait_for(late)
    assert not late.has_room


def test_the_first_word_of_the_peer_is_its_bound() -> None:
    credit = Credit()
    assert not credit.allows(0)
    credit.add(10, MAX_TENSORS)
    assert credit.allows(11)
    credit.take(1)
    assert credit.allows(9)
    assert not credit.allows(10)
    credit.add(1, 1)
    assert credit.allows(11)


def test_without_tensors_to_spare_nothing_goes() -> None:
    credit = Credit()
    credit.add(10, 1)
    credit.take(0)
    assert not credit.allows(0)


BOUND = 2**20
LARGE = 2**18
LOST = PeerLost("the cable was cut")
BYE = PeerLost("goodbye")
BYE.goodbye = True


class FakeLink:
    """As much of a link as a sender uses; it is its own stream and transport."""

    def __init__(self) -> None:
        self.digest = "full"
        self.frames: list[Frame] = []
        self.outgoing_bytes = 0
        self.transfers = 0
        self.sent: list[tuple[int, Callable[[bytes, BaseException | None], None]]] = []
        self.when_drained: list[Callable[[], None]] = []
        self.quiescing: list[int] = []
        self.is_quiet = asyncio.Event()
        self.link = self.payload = self

    def stop(self, transfer: int) -> None:
        """Its threads take their time."""

    async def quiesce(self, transfer: int) -> None:
        self.quiescing.append(transfer)
        await self.is_quiet.wait()

    def has_numbered(self, transfer: int) -> bool:
        return transfer <= self.transfers

    def new_transfer(self) -> int:
        self.transfers += 1
        return self.transfers

    def call_when_drained(self, fn: Callable[[], None]) -> None:
        self.when_drained.append(fn)

    def send(self, *what: Any, digest: bytes | None = None) -> None:
        """A frame and its body; or a transfer, a part, its memory and who is told."""
        if isinstance(what[0], int):
            self.sent.append((what[0], what[-1]))
        else:
            self.frames.append(what[0])


class Sender:
    """An outbound half and what it sent."""

    def __init__(self, *, window: int | None = BOUND) -> None:
        self.link = FakeLink()
        self.frames = self.link.frames
        link: Any = self.link
        self.half = Outbound(link, self._note_small, BOUND)
        if window is not None:
            self.half.has_room(window, MAX_TENSORS)

    def _note_small(self, spec: TensorSpec | None, digest: bytes, body: Buffer) -> None:
        self.frames.append(Push(0, 0, True, spec, digest))

    async def put(self, nbytes: int) -> None:
        parcel = Parcel(TensorSpec((nbytes,), "uint8"))
        await self.half.reserve(parcel)
        zeros = torch.zeros(nbytes, dtype=torch.uint8)
        self.half.put(parcel, HostSource(zeros, b"d"))

    def deliver(self, transfer: int) -> None:
        """Let the peer grant the transfer, and the bytes leave."""
        self.half.on_grant(Grant(transfer))
        self.link.sent[-1][1](b"d", None)


async def test_a_small_tensor_rides_with_its_frame() -> None:
    sender = Sender()
    await sender.put(64)
    spec = TensorSpec((64,), "uint8")
    assert sender.frames == [Push(0, 0, True, spec, b"d")]


async def test_what_is_small_goes_at_once_if_nothing_is_before_it() -> None:
    sender = Sender(window=100)
    spec = TensorSpec((64,), "uint8")
    assert sender.half.send_small(spec, bytes(64), b"d")
    assert not sender.half.send_small(spec, bytes(64), b"d")
    assert sender.frames == [Push(0, 0, True, spec, b"d")]
    assert (sender.half.sent_tensors, sender.half.sent_bytes) == (1, 64)
    assert sender.half.room.used_bytes == 64
    sender.half.has_verified(1)
    assert (sender.half.room.used_bytes, sender.half.room.used_tensors) == (0, 0)


async def test_what_is_small_overtakes_nothing() -> None:
    sender = Sender()
    slow = Parcel(TensorSpec((LARGE,), "uint8"))
    await sender.half.reserve(slow)
    assert not sender.half.send_small(None, b"", b"")
    sender.half.drop(slow)
    assert sender.half.send_small(None, b"", b"")
    await sender.put(BOUND)
    assert not sender.half.send_small(TensorSpec((1,), "uint8"), b"1", b"")


@pytest.mark.parametrize("error", [LOST, BYE])
async def test_nothing_small_goes_once_there_is_no_peer(error: PeerLost) -> None:
    sender = Sender()
    sender.half.end(error)
    assert not sender.half.send_small(None, b"", b"")


async def test_nothing_small_goes_while_much_waits_to_leave() -> None:
    sender = Sender()
    sender.link.outgoing_bytes = 2**20
    assert not sender.half.send_small(None, b"", b"")
    assert sender.half.room.used_tensors == 0


async def test_a_large_tensor_is_announced_granted_and_done() -> None:
    sender = Sender()
    await sender.put(LARGE)
    sender.deliver(1)
    spec = TensorSpec((LARGE,), "uint8")
    assert sender.frames == [Push(1, 0, False, spec), Sent(1, 0, b"d")]


async def test_bytes_are_in_flight_until_the_peer_has_them() -> None:
    sender = Sender()
    await sender.put(64)
    await sender.put(LARGE)
    sender.deliver(1)
    assert sender.half.room.used_bytes == 64 + LARGE
    sender.half.has_verified(1)
    assert sender.half.room.used_bytes == LARGE
    sender.half.has_verified(2)
    assert (sender.half.room.used_bytes, sender.half.room.used_tensors) == (0, 0)


async def test_nothing_is_pushed_before_the_peer_gives_room() -> None:
    sender = Sender(window=None)
    await sender.put(64)
    assert not sender.frames
    sender.half.has_room(BOUND, 1)
    assert len(sender.frames) == 1


async def test_what_the_peer_has_no_room_for_waits_and_nothing_overtakes_it() -> None:
    sender = Sender(window=100)
    for nbytes in (60, 60, 1):
        await sender.put(nbytes)
    assert len(sender.frames) == 1
    sender.half.has_room(60, 1)
    assert len(sender.frames) == 3


async def test_what_is_above_the_peers_room_goes_when_all_was_read() -> None:
    sender = Sender(window=100)
    await sender.put(60)
    await sender.put(LARGE)
    assert len(sender.frames) == 1
    sender.half.has_room(60, 1)
    assert len(sender.frames) == 2


async def test_what_was_dropped_gives_back_its_room_and_its_place() -> None:
    sender = Sender()
    parcel = Parcel(TensorSpec((BOUND,), "uint8"))
    await sender.half.reserve(parcel)
    waiting = asyncio.create_task(sender.put(8))
    await until_blocked(waiting)
    sender.half.drop(parcel)
    await waiting
    assert sender.half.room.used_bytes == 8
    assert len(sender.frames) == 1


async def test_tensors_without_bytes_are_bounded_too() -> None:
    sender = Sender()
    for _ in range(MAX_TENSORS):
        await sender.put(0)
    last = asyncio.create_task(sender.put(0))
    await until_blocked(last)
    assert not last.done()
    sender.half.has_verified(1)
    await last


async def test_a_backlog_of_small_tensors_waits_for_the_link_to_drain() -> None:
    sender = Sender()
    sender.link.outgoing_bytes = 2**20
    await sender.put(64)
    await sender.put(64)
    assert not sender.frames
    assert len(sender.link.when_drained) == 1
    sender.link.outgoing_bytes = 0
    sender.link.when_drained[0]()
    assert len(sender.frames) == 2


async def test_a_flush_waits_for_what_was_put_and_for_nothing_else() -> None:
    sender = Sender()
    await sender.half.flush()
    slow = Parcel(TensorSpec((8,), "uint8"))
    await sender.put(64)
    flushing = asyncio.create_task(sender.half.flush())
    await until_blocked(flushing)
    await sender.half.reserve(slow)
    sender.half.has_verified(1)
    await flushing
    sender.half.drop(slow)


async def test_a_flush_does_not_wait_for_a_place_that_was_given_up() -> None:
    sender = Sender()
    slow = Parcel(TensorSpec((8,), "uint8"))
    await sender.half.reserve(slow)
    await sender.put(64)
    flushing = asyncio.create_task(sender.half.flush())
    await until_blocked(flushing)
    sender.half.drop(slow)
    sender.half.has_verified(1)
    await flushing


async def test_a_lost_peer_is_told_with_what_may_have_arrived() -> None:
    sender = Sender()
    await sender.put(64)
    await sender.put(LARGE)
    calls = [sender.half.flush(), sender.put(BOUND)]
    tasks = [asyncio.create_task(call) for call in calls]
    await until_blocked(*tasks)
    sender.half.end(LOST)
    for task in tasks:
        with pytest.raises(PipeBroken, match="the cable was cut") as caught:
            await task
        assert caught.value.maybe_delivered == 2
    assert sender.half.room.used_bytes == 0


async def test_a_half_has_one_end() -> None:
    sender = Sender()
    await sender.put(64)
    sender.half.end(LOST)
    sender.half.end(BYE)
    with pytest.raises(PipeBroken, match="the cable was cut") as caught:
        await sender.half.flush()
    assert caught.value.maybe_delivered == 1


async def test_after_a_loss_all_that_is_still_read_has_one_second_together() -> None:
    sender = Sender()
    for transfer in (1, 2, 3):
        await sender.put(LARGE)
        sender.half.on_grant(Grant(transfer))
    sender.half.end(LOST)
    ends = [asyncio.create_task(sender.half.quiesce()) for _ in range(2)]
    await until_blocked(*ends)
    assert sender.link.quiescing == [1, 2, 3, 1, 2, 3]
    sender.link.is_quiet.set()
    await asyncio.gather(*ends)
    await sender.half.quiesce()
    assert len(sender.link.quiescing) == 6


async def test_a_goodbye_is_an_end_if_everything_had_arrived() -> None:
    sender = Sender()
    await sender.put(64)
    sender.half.has_verified(1)
    sender.half.end(BYE)
    await sender.half.flush()
    with pytest.raises(EndOfStream):
        await sender.put(1)


async def test_a_goodbye_before_everything_arrived_is_a_loss() -> None:
    sender = Sender()
    await sender.put(64)
    sender.half.end(BYE)
    with pytest.raises(PipeBroken) as caught:
        await sender.half.flush()
    assert caught.value.maybe_delivered == 1


async def test_a_refusing_half_sends_what_it_has_and_takes_no_more() -> None:
    sender = Sender(window=None)
    await sender.put(BOUND)
    waiting = asyncio.create_task(sender.put(BOUND))
    await until_blocked(waiting)
    sender.half.refuse()
    with pytest.raises(EndOfStream):
        await waiting
    sender.half.has_room(BOUND, 1)
    assert len(sender.frames) == 1


@pytest.mark.parametrize(
    ("nbytes", "verified", "why"), [(64, 2, "never sent"), (LARGE, 1, "on its way")]
)
async def test_a_peer_cannot_have_what_has_not_come(
    nbytes: int, verified: int, why: str
) -> None:
    sender = Sender()
    await sender.put(nbytes)
    with pytest.raises(RemoteProtocolError, match=why):
        sender.half.has_verified(verified)


async def test_a_peer_grants_only_what_it_was_offered() -> None:
    sender = Sender()
    await sender.put(64)
    with pytest.raises(RemoteProtocolError, match="never offered"):
        sender.half.on_grant(Grant(1))
    await sender.put(LARGE)
    with pytest.raises(RemoteProtocolError, match="nothing leads to"):
        sender.half.on_grant(Grant(1, "nccl", "off"))
    sender.half.on_grant(Grant(1))


async def test_what_has_left_is_not_sent_again_whatever_the_peer_grants() -> None:
    sender = Sender()
    await sender.put(LARGE)
    sender.deliver(1)
    sender.half.on_grant(Grant(1))
    assert len(sender.link.sent) == 1
    sender.half.has_verified(1)
    sender.half.on_grant(Grant(1))
