from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from asynckv.connectors.caches import BlockMoves, PagedCaches
from asynckv.connectors.p2p.gpu_layers import LayerGathering, Staging
from asynckv.devices.copying import CopyPool
from asynckv.testing.blocked import until, until_blocked
from harness.fake_devices import FakeDevice, fake_device, lanes_of
from harness.fake_gpus.gates import Gate

IDS = ((5, 1),)
LAYER_NBYTES = 2 * 4 * 4


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    with fake_device(seed=5, max_delay=2) as gpu:
        yield gpu


@pytest.fixture
async def moves(gpu: FakeDevice) -> AsyncIterator[BlockMoves]:
    pool = CopyPool(lanes=lanes_of(gpu))
    pools = {layer: gpu.tensor(torch.arange(32.0).view(8, 4)) for layer in "ab"}
    yield (moves := BlockMoves(PagedCaches(pools, None), pool))
    moves.close()
    pool.close()
    await until(lambda: not any("asynckv-" in t.name for t in threading.enumerate()))


def gathering_of(moves: BlockMoves, room: int, came: list[str]) -> LayerGathering:
    blocks_of = functools.partial(moves.caches.blocks, block_ids=IDS)
    return LayerGathering(moves, Staging(room), blocks_of, came.append)


async def waiting_for_room(
    moves: BlockMoves, came: list[str]
) -> tuple[LayerGathering, asyncio.Task[None]]:
    """Gather two layers where there is room for one: the second waits."""
    gathering = gathering_of(moves, LAYER_NBYTES, came)
    for layer in "ab":
        gathering.offer(layer, None)
    gathering.finish()
    running = asyncio.create_task(gathering.run())
    await until(lambda: gathering.is_waiting_for_room)
    return gathering, running


async def test_layers_come_in_the_order_of_their_offers(moves: BlockMoves) -> None:
    came: list[str] = []
    gathering = gathering_of(moves, 2 * LAYER_NBYTES, came)
    for layer in "ba":
        gathering.offer(layer, moves.now())
    gathering.finish()
    await gathering.run()
    assert came == ["b", "a"]
    found = gathering.copy_of("a").tensor("a", "a.key")
    assert found.tolist() == torch.arange(32.0).view(8, 4)[[5, 1]].tolist()
    gathering.drop()
    assert gathering._staging.used_bytes == 0


async def test_where_there_is_no_room_it_waits_until_a_layer_is_dropped(
    moves: BlockMoves,
) -> None:
    came: list[str] = []
    gathering, running = await waiting_for_room(moves, came)
    assert came == ["a"]
    gathering.drop("a")
    await running
    assert (came, gathering.is_waiting_for_room) == (["a", "b"], False)


async def test_a_layer_that_nobody_needs_any_more_is_not_waited_for(
    moves: BlockMoves,
) -> None:
    came: list[str] = []
    gathering, running = await waiting_for_room(moves, came)
    gathering.drop("b")
    await running
    assert (came, gathering._staging.copies) == (["a", "b"], 1)
    gathering.drop()


async def test_a_layer_that_nobody_needs_when_it_is_there_is_dropped(
    moves: BlockMoves, gpu: FakeDevice
) -> None:
    gate = Gate()
    gpu.tensors.stream(0).add(gate)
    came: list[str] = []
    gathering = gathering_of(moves, LAYER_NBYTES, came)
    gathering.offer("a", moves.now())
    gathering.finish()
    running = asyncio.create_task(gathering.run())
    await until_blocked(running)
    gathering.drop("a")
    gate.open()
    await running
    assert (came, gathering._staging.used_bytes) == (["a"], 0)


async def test_it_fails_for_want_of_room_when_no_step_waits(moves: BlockMoves) -> None:
    gathering = gathering_of(moves, LAYER_NBYTES - 1, [])
    gathering.may_wait_for_room = False
    gathering.offer("a", None)
    with pytest.raises(TimeoutError, match="no room"):
        await gathering.run()


async def test_cancelled_while_the_engine_computes_it_keeps_no_room(
    moves: BlockMoves, gpu: FakeDevice
) -> None:
    gate = Gate()
    gpu.tensors.stream(0).add(gate)
    gathering = gathering_of(moves, LAYER_NBYTES, [])
    gathering.offer("a", moves.now())
    running = asyncio.create_task(gathering.run())
    await until_blocked(running)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (gathering._staging.used_bytes, gpu.process.cuda.launches) == (0, 0)
    gate.open()


async def test_nothing_is_scattered_before_what_the_stream_still_reads(
    moves: BlockMoves, gpu: FakeDevice
) -> None:
    gate = Gate()
    gpu.tensors.stream(0).add(gate)
    blocks = moves.caches.blocks("a", IDS)["a.key"]
    scattering = moves.scatter([torch.zeros(2, 4)], [blocks], moves.now())
    running = asyncio.create_task(scattering)
    await until_blocked(running)
    others = moves.caches.blocks("b", IDS)["b.key"]
    for _ in range(3):
        await moves.scatter([torch.ones(2, 4)], [others], None)
    assert moves.caches.pools("a")[0].cpu()[5].tolist() == [20, 21, 22, 23]
    gate.open()
    await running
    assert not moves.caches.pools("a")[0].cpu()[[5, 1]].any()


async def test_it_waits_for_room_no_longer_when_it_copies(
    moves: BlockMoves, gpu: FakeDevice
) -> None:
    gate = Gate()
    gathering = gathering_of(moves, LAYER_NBYTES, [])
    gathering.offer("a", None)
    gpu.tensors.stream(0).add(gate)
    gathering.offer("b", moves.now())
    gathering.finish()
    running = asyncio.create_task(gathering.run())
    await until(lambda: gathering.is_waiting_for_room)
    gathering.drop("a")
    await until(lambda: gathering._staging.used_bytes > 0)
    assert not gathering.is_waiting_for_room
    gate.open()
    await running
