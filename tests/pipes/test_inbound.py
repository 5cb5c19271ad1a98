from __future__ import annotations

import asyncio

import pytest
import torch

from asynckv.devices import growth
from asynckv.errors import ChecksumError, EndOfStream, PeerLost, RemoteProtocolError
from asynckv.pipes import inbound
from asynckv.pipes.inbound import Inbound, Reports
from asynckv.pipes.parcels import MAX_TENSORS
from asynckv.protocol.frames import (
    Flushed,
    Frame,
    Push,
    Read,
)
from asynckv.protocol.transfer_frames import Grant
from asynckv.testing import until, until_blocked
from asynckv.types import TensorSpec
from harness.receiving_halves import HALF_BYTES, HalfLink, ReceivingHalf

LARGE = 2**18
LOST = PeerLost("the cable was cut")
BYE = PeerLost("goodbye")
BYE.goodbye = True
NOTHING = Push(inline=True)


@pytest.fixture(autouse=True)
def on_the_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors land at once; what slabs change is in test_arrivals.py."""
    monkeypatch.setattr(growth, "has_slabs", lambda: False)


async def test_what_was_verified_and_what_was_taken_is_told_once_a_tick() -> None:
    receiver = ReceivingHalf()
    for transfer in (1, 2, 3):
        receiver.push(100, transfer)
    await receiver.next()
    await receiver.next()
    assert receiver.frames == []
    await asyncio.sleep(0)
    assert receiver.frames == [Flushed(3)]
    assert (receiver.half.held_bytes, receiver.half.held_tensors) == (100, 1)
    await until(lambda: receiver.frames[1:] == [Read(200, 2)])


async def test_large_tensors_land_in_any_order_and_come_in_theirs() -> None:
    receiver = ReceivingHalf()
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


async def test_a_changed_small_tensor_breaks_the_stream_behind_what_is_good() -> None:
    receiver = ReceivingHalf()
    receiver.push(8)
    spec = TensorSpec((8,), "uint8")
    push = Push(inline=True, spec=spec, digest=b"not its digest")
    receiver.half.on_push(push, bytes(8))
    assert len(receiver.broken) == 1
    receiver.half.end(LOST)
    assert await receiver.next() is not None
    for _ in range(2):
        with pytest.raises(ChecksumError):
            await receiver.next()


async def test_a_changed_large_tensor_breaks_the_stream_too() -> None:
    receiver = ReceivingHalf()
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
    receiver = ReceivingHalf()
    receiver.push(8, 1)
    receiver.push(LARGE, 2)
    receiver.half.end(error)
    assert receiver.link.stopped == [2]
    assert await receiver.next() is not None
    with pytest.raises(PeerLost):
        await receiver.next()


async def test_what_was_closed_here_gives_nothing_more() -> None:
    receiver = ReceivingHalf()
    receiver.push(8)
    arrival = await receiver.half.head()
    receiver.half.end(BYE, keep=False)
    with pytest.raises(EndOfStream):
        receiver.half.take(arrival)
    assert receiver.half.held_bytes == 0


async def test_a_peer_that_was_given_no_room_may_send_nothing() -> None:
    half = Inbound(HalfLink(), HALF_BYTES, lambda error: None)  # type: ignore[arg-type]
    with pytest.raises(RemoteProtocolError, match="no room"):
        half.on_push(NOTHING, b"")


@pytest.mark.parametrize(
    ("nbytes", "count"), [((HALF_BYTES - 10), 1), (0, MAX_TENSORS)]
)
async def test_a_peer_may_not_send_more_than_there_is_room_for(
    nbytes: int, count: int
) -> None:
    receiver = ReceivingHalf()
    for _ in range(count):
        receiver.push(nbytes)
    with pytest.raises(RemoteProtocolError, match="no room"):
        receiver.push(11, 2)


@pytest.mark.parametrize(
    ("push", "body"),
    [
        (Push(1, 0, False), b""),
        (Push(1, 0, False, TensorSpec((8,), "uint8")), b""),
        (Push(1, 0, False, TensorSpec((LARGE,), "uint8")), b"too early"),
        (Push(1, 0, True, TensorSpec((LARGE,), "uint8")), b""),
        (Push(0, 0, True, TensorSpec((8,), "uint8")), b"seven b"),
        (Push(0, 0, True, TensorSpec((8,), "uint8")), b"nine byte"),
        (Push(0, 0, True), b"None has no bytes"),
        (Push(0, 0, True, TensorSpec((2**16 + 1,), "uint8")), bytes(2**16 + 1)),
    ],
)
async def test_a_push_that_is_not_what_it_says_is_a_lie(
    push: Push, body: bytes
) -> None:
    with pytest.raises(RemoteProtocolError, match="declared size|came along"):
        ReceivingHalf().half.on_push(push, body)


async def test_tensors_of_one_shape_in_a_row_are_each_their_own() -> None:
    receiver = ReceivingHalf()
    found: list[torch.Tensor | None] = []
    for seed in range(3):
        taking = asyncio.create_task(receiver.next())
        await until_blocked(taking)
        receiver.send(bytes([seed] * 8))
        found.append(await taking)
    assert [t.tolist() for t in found if t is not None] == [[n] * 8 for n in range(3)]


async def test_what_follows_one_that_is_not_whole_is_said_to_be_whole_with_it() -> None:
    receiver = ReceivingHalf()
    receiver.push(LARGE, 1)
    receiver.push(8, 2)
    receiver.half.reports.tell()
    assert receiver.frames == [Grant(1)]
    receiver.land(1)
    receiver.half.reports.tell()
    assert receiver.frames == [Grant(1), Flushed(2)]


@pytest.mark.parametrize("nbytes", [8, LARGE])
async def test_a_dtype_that_this_torch_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr(inbound, "MISSING_DTYPES", frozenset({"uint8"}))
    with pytest.raises(RemoteProtocolError, match="unknown to this torch"):
        ReceivingHalf().push(nbytes)


BOUND = 1000


@pytest.fixture
def said() -> list[Frame]:
    return []


@pytest.fixture
async def reports(said: list[Frame]) -> Reports:
    return Reports(lambda frame, body: said.append(frame), BOUND)


async def test_all_of_one_tick_is_said_together(
    reports: Reports, said: list[Frame]
) -> None:
    reports.owe(BOUND, 2)
    reports.owe(0, 1)
    reports.verified(2)
    assert not said
    await asyncio.sleep(0)
    assert said == [Flushed(2), Read(BOUND, 3)]


async def test_little_room_is_said_a_little_later_and_all_of_it_then(
    reports: Reports, said: list[Frame]
) -> None:
    reports.owe(BOUND // 4 - 2, 1)
    await asyncio.sleep(0)
    reports.owe(1, 1)
    reports.tell()
    assert not said
    await until(lambda: bool(said))
    assert said == [Read(BOUND // 4 - 1, 2)]


@pytest.mark.parametrize(
    ("nbytes", "tensors"), [(BOUND // 4, 1), (0, MAX_TENSORS // 4)]
)
async def test_room_is_said_at_once_with_a_quarter_of_the_bound(
    reports: Reports, said: list[Frame], nbytes: int, tensors: int
) -> None:
    reports.owe(nbytes, tensors)
    await asyncio.sleep(0)
    assert said == [Read(nbytes, tensors)]


async def test_what_somebody_else_says_is_not_said_again(
    reports: Reports, said: list[Frame]
) -> None:
    reports.verified(2)
    assert (reports.take_verified(), reports.take_verified()) == (2, 0)
    await asyncio.sleep(0)
    assert not said
    reports.verified(1)
    await asyncio.sleep(0)
    assert said == [Flushed(3)]


async def test_what_was_not_told_to_have_room_may_not_come(reports: Reports) -> None:
    reports.owe(BOUND, 1)
    with pytest.raises(RemoteProtocolError, match="no room"):
        reports.charge(1)
    reports.tell()
    reports.charge(1)
    with pytest.raises(RemoteProtocolError, match="no room"):
        reports.charge(1)


async def test_what_is_above_the_bound_comes_when_all_of_it_is_free(
    reports: Reports,
) -> None:
    reports.owe(BOUND, 3)
    reports.tell()
    reports.charge(2 * BOUND)
    with pytest.raises(RemoteProtocolError, match="no room"):
        reports.charge(1)
    reports.owe(2 * BOUND, 1)
    reports.tell()
    reports.charge(BOUND)


async def test_after_the_end_nothing_is_said_by_itself(
    reports: Reports, said: list[Frame]
) -> None:
    reports.owe(BOUND, 1)
    reports.end()
    reports.verified(1)
    await asyncio.sleep(0)
    assert not said
    reports.tell()
    assert said == [Flushed(1), Read(BOUND, 1)]
