from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asynckv.errors import ChecksumError, EndOfStream, PeerLost, RemoteProtocolError
from asynckv.pipes import inbound
from asynckv.pipes.inbound import Inbound
from asynckv.pipes.parcels import MAX_TENSORS
from asynckv.protocol.digests import digest_of
from asynckv.protocol.frames import (
    Flushed,
    Frame,
    Push,
    Read,
)
from asynckv.protocol.payload_frames import Done, Grant
from asynckv.tensors import growth, lending
from asynckv.tensors.slabs import has_slabs
from asynckv.testing import until, until_blocked
from asynckv.types import TensorSpec

BOUND = 2**20
LARGE = 2**18
LOST = PeerLost("the cable was cut")
BYE = PeerLost("goodbye")
BYE.goodbye = True


@pytest.fixture(autouse=True)
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where tensors land: at once on the ``heap``, or in ``slabs`` that come soon."""
    kind: str = getattr(request, "param", "heap")
    if kind == "heap":
        monkeypatch.setattr(growth, "has_slabs", lambda: False)
    elif not has_slabs():
        pytest.skip("no memory files here")
    return kind


in_slabs = pytest.mark.parametrize("memory", ["slabs"], indirect=True)


class FakeLink:
    """As much of a link as a receiver uses; it is its own payload transport."""

    def __init__(self) -> None:
        self.digest = "full"
        self.announced: list[int] = []
        self.stopped: list[int] = []
        self.landing: dict[int, Callable[[bytes, BaseException | None], None]] = {}
        self.payload = self
        self.progress = self

    def expect(self, transfer: int) -> None: ...

    def forget(self, transfer: int) -> None: ...

    def announce(self, transfer: int) -> None:
        self.announced.append(transfer)

    def receive(self, transfer: int, part: int, target: memoryview, done: Any) -> None:
        self.landing[transfer] = done

    def stop(self, transfer: int) -> None:
        self.stopped.append(transfer)


class Receiver:
    """An inbound half, open, and what it said."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.broken: list[ChecksumError] = []
        self.link = FakeLink()
        self.half = Inbound(
            self.link,  # type: ignore[arg-type]
            lambda frame, body: self.frames.append(frame),
            BOUND,
            self.broken.append,
        )
        self.half.open()
        self.half.reports.tell()
        self.frames.clear()

    def push(self, nbytes: int, transfer: int = 1, dtype: str = "uint8") -> None:
        spec = TensorSpec((nbytes,), dtype)
        body = bytes(nbytes) if nbytes <= 2**16 else b""
        push = Push(transfer, 0, bool(body), spec, digest_of(body))
        self.half.on_push(push, body)

    def land(self, transfer: int = 1, *, sent: bytes = b"d") -> None:
        self.link.landing[transfer](b"d", None)
        self.half.on_done(Done(transfer, 0, sent))

    async def next(self) -> torch.Tensor | None:
        arrival = await self.half.head()
        self.half.take(arrival)
        return arrival.tensor


async def test_the_peer_is_told_how_much_there_is_room_for() -> None:
    frames: list[Frame] = []
    half = Inbound(
        FakeLink(),  # type: ignore[arg-type]
        lambda frame, body: frames.append(frame),
        BOUND,
        lambda error: None,
    )
    half.open()
    half.reports.tell()
    assert frames == [Read(BOUND, MAX_TENSORS)]


async def test_what_was_verified_and_what_was_taken_is_told_once_a_tick() -> None:
    receiver = Receiver()
    for transfer in (1, 2, 3):
        receiver.push(100, transfer)
    await receiver.next()
    await receiver.next()
    assert receiver.frames == []
    await asyncio.sleep(0)
    assert receiver.frames == [Flushed(3), Read(200, 2)]
    assert (receiver.half.held_bytes, receiver.half.held_tensors) == (100, 1)


async def test_large_tensors_land_in_any_order_and_come_in_theirs() -> None:
    receiver = Receiver()
    receiver.push(LARGE, 1)
    receiver.push(LARGE + 1, 2)
    assert receiver.frames == [Grant(1), Grant(2)]
    receiver.land(2)
    receiver.half.reports.tell()
    assert Flushed(1) not in receiver.frames
    receiver.land(1)
    receiver.half.reports.tell()
    assert receiver.frames[-1] == Flushed(2)
    first = await receiver.next()
    assert first is not None
    assert first.nbytes == LARGE


async def test_a_tensor_above_the_bound_gets_memory_when_somebody_waits() -> None:
    receiver = Receiver()
    receiver.push(2 * BOUND)
    assert receiver.link.announced == [1]
    assert receiver.frames == []
    waiting = asyncio.create_task(receiver.next())
    await until_blocked(waiting)
    assert receiver.frames == [Grant(1)]
    receiver.land()
    tensor = await waiting
    assert tensor is not None
    assert tensor.nbytes == 2 * BOUND


async def test_without_memory_for_it_a_tensor_stays_in_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(spec: TensorSpec) -> torch.Tensor:
        raise RuntimeError("out of memory")

    receiver = Receiver()
    with monkeypatch.context() as patch:
        patch.setattr(lending, "empty_tensor", none_left)
        receiver.push(LARGE)
        with pytest.raises(MemoryError, match=str(LARGE)):
            await receiver.next()
    waiting = asyncio.create_task(receiver.next())
    await until_blocked(waiting)
    receiver.land()
    assert await waiting is not None


async def test_a_changed_small_tensor_breaks_the_stream_behind_what_is_good() -> None:
    receiver = Receiver()
    receiver.push(8)
    spec = TensorSpec((8,), "uint8")
    receiver.half.on_push(Push(2, 0, True, spec, b"not its digest"), bytes(8))
    assert len(receiver.broken) == 1
    receiver.half.end(LOST)
    assert await receiver.next() is not None
    for _ in range(2):
        with pytest.raises(ChecksumError):
            await receiver.next()


async def test_a_changed_large_tensor_breaks_the_stream_too() -> None:
    receiver = Receiver()
    receiver.push(LARGE, 1)
    receiver.push(8, 2)
    receiver.land(1, sent=b"other")
    assert len(receiver.broken) == 1
    receiver.half.end(LOST)
    assert receiver.half.held_bytes == 0
    with pytest.raises(ChecksumError):
        await receiver.next()


@pytest.mark.parametrize("error", [LOST, BYE])
async def test_what_has_come_whole_can_be_taken_after_a_loss(error: PeerLost) -> None:
    receiver = Receiver()
    receiver.push(8, 1)
    receiver.push(LARGE, 2)
    receiver.half.end(error)
    assert receiver.link.stopped == [2]
    assert await receiver.next() is not None
    with pytest.raises(PeerLost):
        await receiver.next()


async def test_a_goodbye_after_everything_is_the_end() -> None:
    receiver = Receiver()
    waiting = asyncio.create_task(receiver.next())
    await until_blocked(waiting)
    receiver.half.end(BYE)
    with pytest.raises(EndOfStream):
        await waiting


async def test_what_was_closed_here_gives_nothing_more() -> None:
    receiver = Receiver()
    receiver.push(8)
    arrival = await receiver.half.head()
    receiver.half.end(BYE, keep=False)
    with pytest.raises(EndOfStream):
        receiver.half.take(arrival)
    assert receiver.half.held_bytes == 0


async def test_a_peer_that_was_given_no_room_may_send_nothing() -> None:
    half = Inbound(
        FakeLink(),  # type: ignore[arg-type]
        lambda frame, body: None,
        BOUND,
        lambda error: None,
    )
    with pytest.raises(RemoteProtocolError, match="no room"):
        half.on_push(Push(1, 0, inline=True), b"")


async def test_a_peer_may_not_send_more_than_there_is_room_for() -> None:
    receiver = Receiver()
    receiver.push(BOUND - 10)
    with pytest.raises(RemoteProtocolError, match="no room"):
        receiver.push(11, 2)


async def test_a_peer_may_not_send_more_tensors_than_there_is_room_for() -> None:
    receiver = Receiver()
    for transfer in range(MAX_TENSORS):
        receiver.half.on_push(Push(transfer, 0, inline=True), b"")
    with pytest.raises(RemoteProtocolError, match="no room"):
        receiver.half.on_push(Push(MAX_TENSORS, 0, inline=True), b"")


@pytest.mark.parametrize(
    ("push", "body"),
    [
        (Push(1, 0, True, TensorSpec((8,), "uint8")), b"seven b"),
        (Push(1, 0, True), b"None has no bytes"),
        (Push(1, 0, False, TensorSpec((8,), "uint8")), b""),
        (Push(1, 0, False, TensorSpec((LARGE,), "uint8")), b"too early"),
        (Push(1, 0, True, TensorSpec((LARGE,), "uint8")), bytes(LARGE)),
    ],
)
async def test_a_push_that_is_not_what_it_says_is_a_lie(
    push: Push, body: bytes
) -> None:
    with pytest.raises(RemoteProtocolError):
        Receiver().half.on_push(push, body)


async def test_a_dtype_that_this_torch_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(name: str) -> torch.dtype:
        raise ValueError(f"dtype {name!r} cannot be sent by this version of torch")

    monkeypatch.setattr(inbound, "dtype_of", unknown)
    with pytest.raises(RemoteProtocolError, match="this version of torch"):
        Receiver().push(8)


async def test_a_done_for_what_was_never_granted_is_a_lie() -> None:
    receiver = Receiver()
    receiver.push(2 * BOUND)
    with pytest.raises(RemoteProtocolError, match="never granted"):
        receiver.half.on_done(Done(1, 0))


@in_slabs
async def test_what_waits_for_a_slab_is_granted_when_it_is_there() -> None:
    receiver = Receiver()
    receiver.push(LARGE, 1)
    receiver.push(LARGE, 2)
    receiver.push(100, 3)
    assert receiver.frames == []
    await until(lambda: receiver.frames[:2] == [Grant(1), Grant(2)])
    receiver.land(1)
    assert (await receiver.next()) is not None
    await receiver.half.aclose()


@in_slabs
async def test_memory_that_was_taken_and_forgotten_is_received_into_again() -> None:
    receiver, addresses = Receiver(), set()
    for transfer in range(1, 5):
        receiver.push(LARGE, transfer)
        await until(lambda: Grant(transfer) in receiver.frames)  # noqa: B023
        receiver.land(transfer)
        tensor = await receiver.next()
        assert tensor is not None
        addresses.add(tensor.data_ptr())
        receiver.link.landing.clear()
        del tensor
    assert len(addresses) == 1
    await receiver.half.aclose()


@in_slabs
async def test_what_is_cut_while_it_waits_for_a_slab_is_never_granted() -> None:
    receiver = Receiver()
    receiver.push(LARGE)
    receiver.half.end(LOST)
    await receiver.half.aclose()
    assert receiver.frames == []
    with pytest.raises(PeerLost):
        await receiver.next()


@in_slabs
async def test_somebody_who_waits_for_what_waits_for_a_slab_gets_it() -> None:
    receiver = Receiver()
    receiver.push(LARGE)
    waiting = asyncio.create_task(receiver.next())
    await until(lambda: receiver.frames == [Grant(1)])
    receiver.land()
    assert (await waiting) is not None
    receiver.half.abort()
    await receiver.half.aclose()
