from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from asynckv.devices import growth, growth as lending
from asynckv.errors import ChecksumError, EndOfStream, PeerLost, RemoteProtocolError
from asynckv.pipes import arrivals, inbound
from asynckv.pipes.arrivals import ReadAhead
from asynckv.pipes.inbound import Inbound, Reports
from asynckv.pipes.outbound import MAX_TENSORS
from asynckv.protocol.frames import (
    Flushed,
    Frame,
    Push,
    Read,
)
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.tensors.slabs import has_slabs
from asynckv.testing import until, until_blocked
from asynckv.types import TensorSpec
from harness.receiving_halves import HALF_BYTES, HalfLink, ReceivingHalf

LARGE = 2**18
LOST = PeerLost("the cable was cut")
BYE = PeerLost("goodbye")
BYE.goodbye = True
NOTHING = Push(inline=True)


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


async def test_how_it_ended_first_is_what_is_told() -> None:
    receiver = ReceivingHalf()
    receiver.half.end(LOST)
    receiver.half.end(BYE)
    with pytest.raises(PeerLost, match="cable"):
        await receiver.half.head()


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


async def test_a_tensor_above_the_bound_gets_memory_when_somebody_waits() -> None:
    receiver = ReceivingHalf()
    receiver.push(2 * HALF_BYTES)
    assert receiver.link.announced == [1]
    assert receiver.frames == []
    waiting = asyncio.create_task(receiver.next())
    await until_blocked(waiting)
    assert receiver.frames == [Grant(1)]
    receiver.land()
    tensor = await waiting
    assert tensor is not None
    assert tensor.nbytes == 2 * HALF_BYTES


async def test_without_memory_for_it_a_tensor_stays_in_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(spec: TensorSpec) -> torch.Tensor:
        raise RuntimeError("out of memory")

    receiver = ReceivingHalf()
    with monkeypatch.context() as patch:
        patch.setattr(lending, "empty_tensor", none_left)
        receiver.push(LARGE)
        with pytest.raises(MemoryError, match=str(LARGE)):
            await receiver.next()
    waiting = asyncio.create_task(receiver.next())
    await until_blocked(waiting)
    receiver.land()
    assert await waiting is not None


async def test_what_was_never_granted_cannot_have_been_sent() -> None:
    receiver = ReceivingHalf()
    receiver.push(2 * HALF_BYTES)
    for transfer in (1, 99):
        with pytest.raises(RemoteProtocolError, match="no Sent belongs here"):
            receiver.half.granting.on_sent(Sent(transfer, 0))


async def test_what_was_granted_to_the_host_does_not_come_from_gpu_to_gpu() -> None:
    receiver = ReceivingHalf()
    receiver.push(LARGE)
    with pytest.raises(RemoteProtocolError, match="not asked for"):
        receiver.half.granting.on_sent(Sent(1, 0, b"", "off", "nccl"))


@in_slabs
async def test_what_waits_for_a_slab_is_granted_when_it_is_there() -> None:
    receiver = ReceivingHalf()
    receiver.push(LARGE, 1)
    receiver.push(LARGE, 2)
    receiver.push(100, 3)
    assert receiver.frames == []
    await until(lambda: receiver.frames[:2] == [Grant(1), Grant(2)])
    receiver.land(1)
    assert (await receiver.next()) is not None
    await receiver.half.granting.aclose()


@in_slabs
async def test_memory_that_was_taken_and_forgotten_is_received_into_again() -> None:
    receiver, addresses = ReceivingHalf(), set()
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
    await receiver.half.granting.aclose()


@in_slabs
async def test_what_is_cut_while_it_waits_for_a_slab_is_never_granted() -> None:
    receiver = ReceivingHalf()
    receiver.push(LARGE)
    receiver.half.end(PeerLost("the cable was cut"))
    await receiver.half.granting.aclose()
    assert receiver.frames == []
    with pytest.raises(PeerLost):
        await receiver.next()


@in_slabs
async def test_somebody_who_waits_for_what_waits_for_a_slab_gets_it() -> None:
    receiver = ReceivingHalf()
    receiver.push(LARGE)
    waiting = asyncio.create_task(receiver.next())
    await until(lambda: receiver.frames == [Grant(1)])
    receiver.land()
    assert (await waiting) is not None
    receiver.half.granting.abort()
    await receiver.half.granting.aclose()


def made(
    monkeypatch: pytest.MonkeyPatch, wait_s: float = 0
) -> tuple[ReadAhead[str], Any]:
    monkeypatch.setattr(arrivals, "_WAIT_S", wait_s)
    begun: list[Any] = []
    return ReadAhead(begun.append), begun


async def test_what_nobody_asks_for_is_begun_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead, begun = made(monkeypatch)
    for name in "abcdef":
        ahead.add(name)
    assert not begun
    await until(lambda: len(begun) == 1)
    await until(lambda: len(begun) == 3)
    await until(lambda: begun == [*"abcdef"])
    assert ahead._timer is None


async def test_who_takes_what_it_gets_gets_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead, begun = made(monkeypatch, 3600)
    ahead.add("a")
    ahead.asked(into=False)
    assert begun == ["a"] and ahead._timer is None
    ahead.add("b")
    assert begun == ["a", "b"]
    ahead.asked(into=True)
    ahead.add("c")
    assert begun == ["a", "b"]
    ahead.forget("c")
    assert ahead._timer is None


async def test_nothing_is_begun_while_the_application_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead, begun = made(monkeypatch)
    ahead.is_paused = True
    ahead.add("a")
    for _ in range(10):
        await asyncio.sleep(0)
        assert not begun
    ahead.is_paused = False
    await until(lambda: begun == ["a"])


async def test_who_has_just_asked_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead, begun = made(monkeypatch, 3600)
    ahead.asked(into=True)
    ahead.add("a")
    ahead._recheck()
    assert not begun
    ahead._recheck()
    assert begun == ["a"]
    ahead.stop()
