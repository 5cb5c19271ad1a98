from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from asynckv.devices import growth, growth as lending
from asynckv.errors import PeerLost, RemoteProtocolError
from asynckv.pipes import arrivals
from asynckv.pipes.arrivals import ReadAhead
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.tensors.slabs import has_slabs
from asynckv.testing import until, until_blocked
from asynckv.types import TensorSpec
from harness.receiving_halves import HALF_BYTES, ReceivingHalf

LARGE = 2**18


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
    ahead._look()
    assert not begun
    ahead._look()
    assert begun == ["a"]
    ahead.stop()
