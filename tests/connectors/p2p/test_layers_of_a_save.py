"""The layers of one save on a GPU, and targets that take them as a test says."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
import torch

from asynckv.connectors.caches import BlockMoves, PagedCaches
from asynckv.connectors.p2p.gpu_layers import GpuLayers, Staging
from asynckv.devices.arena import DeviceArena
from asynckv.devices.copying import CopyPool
from asynckv.tensors.blocks import KVMemory
from asynckv.testing.blocked import until, until_blocked
from asynckv.transfers.source import StagedTensor
from asynckv.transfers.staging import StagingWriter
from asynckv.types import TensorSpec
from harness.device_memory import open_device_arena, region_in
from harness.fake_devices import FakeDevice, fake_device, lanes_of
from harness.fake_gpus.gates import Gate

IDS = ((5, 1),)
WIDTH = 32 * 2**10
LAYER_NBYTES = 2 * WIDTH * 4
AMPLE = 10 * LAYER_NBYTES


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    with fake_device(seed=5) as gpu:
        yield gpu


@pytest.fixture
def arena(gpu: FakeDevice) -> Iterator[DeviceArena]:
    with open_device_arena(gpu) as arena:
        yield arena


@pytest.fixture
async def moves(gpu: FakeDevice) -> AsyncIterator[BlockMoves]:
    pool = CopyPool(lanes=lanes_of(gpu))
    content = torch.arange(8.0 * WIDTH).view(8, WIDTH)
    pools = {layer: gpu.tensor(content + number) for number, layer in enumerate("ab")}
    yield (moves := BlockMoves(PagedCaches(pools, None), pool))
    moves.close()
    pool.close()
    await until(lambda: not any("asynckv-" in t.name for t in threading.enumerate()))


class Target(StagingWriter):
    """Takes what is put; there is memory of the GPU for that while ``has_room``."""

    def __init__(self, gpu: FakeDevice, arena: DeviceArena) -> None:
        self.entry_id = "entry"
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.leads_there = True
        self.error: Exception | None = None
        self.waiting = self.asked = 0
        self.by_gpu: list[str] = []
        self.found: dict[str, list[float]] = {}
        self._gpu, self._arena = gpu, arena

    async def put(self, name: str, tensor: KVMemory) -> None:
        assert isinstance(tensor, torch.Tensor)
        self.found[name] = tensor[:, 0].tolist()

    async def room(self, specs: Sequence[TensorSpec]) -> list[StagedTensor] | None:
        self.asked += 1
        if self.error is not None:
            raise self.error
        if not self.leads_there:
            return None
        self.waiting += 1
        try:
            await self.has_room.wait()
        finally:
            self.waiting -= 1
        return [StagedTensor(region_in(self._arena, s.nbytes), s) for s in specs]

    async def put_staged(self, name: str, staged: StagedTensor) -> None:
        self.by_gpu.append(name)
        view = self._gpu.process.cuda.view(staged.place())
        self.found[name] = view.view("float32").reshape(2, WIDTH)[:, 0].tolist()

    def check(self) -> None:
        """It has the blocks of all layers, as they are in the caches."""
        starts = [5.0 * WIDTH, 1.0 * WIDTH]
        assert self.found == {"a.key": starts, "b.key": [one + 1 for one in starts]}


@dataclasses.dataclass
class Save:
    """A save whose layers are put at ``targets``; all of them are offered."""

    moves: BlockMoves
    targets: list[Target]
    staging: Staging = dataclasses.field(default_factory=lambda: Staging(AMPLE))
    by_host: bool = False
    first_layers: int = 2
    """So many are put at first."""

    async def __aenter__(self) -> GpuLayers:
        blocks_of = functools.partial(self.moves.caches.blocks, block_ids=IDS)
        self.layers = layers = GpuLayers(
            *(self.moves, self.staging, blocks_of, lambda: None), by_host=self.by_host
        )
        layers.begin(len(self.targets))
        self.running = asyncio.create_task(layers.run())
        mark, self.puts = self.moves.now(), list[asyncio.Task[None]]()
        for layer in "ab":
            layers.offer(layer, mark)
        self.queues = [asyncio.Queue[str]() for _ in self.targets]
        self._offer(slice(0, self.first_layers))
        for target, queue in zip(self.targets, self.queues, strict=True):
            self.puts.append(asyncio.create_task(layers.put(target, queue)))
        return layers

    async def __aexit__(self, *exc_info: object) -> None:
        for task in (*self.puts, self.running):
            task.cancel()
        await asyncio.wait((*self.puts, self.running))
        self.layers.drop()
        await until(lambda: not self.staging.used_bytes)

    def _offer(self, some: slice) -> None:
        for queue, order in zip(self.queues, ("ab", "ba"), strict=False):
            for layer in order[some]:
                queue.put_nowait(layer)

    async def end(self) -> None:
        """Wait until all is put, and look at every target."""
        self._offer(slice(self.first_layers, None))
        async with asyncio.timeout(20):
            await asyncio.gather(*self.puts)
        for target in self.targets:
            target.check()
        assert not self.layers.are_read


@pytest.fixture
def target(gpu: FakeDevice, arena: DeviceArena) -> Target:
    return Target(gpu, arena)


@pytest.fixture
def other(gpu: FakeDevice, arena: DeviceArena) -> Target:
    return Target(gpu, arena)


async def test_what_waits_for_memory_of_the_gpu_says_so(
    moves: BlockMoves, target: Target
) -> None:
    target.has_room.clear()
    save = Save(moves, [target])
    async with save as layers:
        await until(lambda: target.waiting > 0)
        assert layers.wait_for_room and not layers.wait_for_nobody
        target.has_room.set()
        await save.end()
        assert not layers.wait_for_room and target.by_gpu == ["a.key", "b.key"]


async def test_what_waits_for_host_memory_waits_for_somebody(
    moves: BlockMoves, target: Target
) -> None:
    save = Save(moves, [target], Staging(LAYER_NBYTES - 1), by_host=True)
    async with save as layers:
        await until(lambda: layers.wait_for_room)
        assert not layers.wait_for_nobody
        save.staging.max_bytes = AMPLE
        save.staging.release(0)
        await save.end()
        assert layers.wait_for_nobody


async def test_every_target_gets_what_came_to_the_host_once(
    moves: BlockMoves, target: Target, other: Target
) -> None:
    save = Save(moves, [target, other], by_host=True)
    async with save as layers:
        await save.end()
        assert save.staging.copies == 2 and not save.staging.used_bytes
        assert layers.nbytes == 4 * LAYER_NBYTES


async def test_who_waits_for_memory_of_the_gpu_ends_that_when_it_is_to_leave(
    moves: BlockMoves, target: Target
) -> None:
    target.has_room.clear()
    save = Save(moves, [target], Staging(LAYER_NBYTES - 1))
    async with save as layers:
        await until(lambda: target.waiting > 0)
        layers.leave_gpu()
        await until(lambda: not target.waiting)  # though the host has no room yet
        save.staging.max_bytes = AMPLE
        save.staging.release(0)
        await save.end()
        assert not target.by_gpu


async def test_what_is_put_does_not_come_to_the_host_any_more(
    moves: BlockMoves, target: Target
) -> None:
    save = Save(moves, [target])
    async with save as layers:
        await save.end()
        layers.leave_gpu()
        layers.finish()
        await save.running
        assert (save.staging.copies, layers.are_read) == (0, False)


async def test_in_a_hurry_it_does_not_wait_for_host_memory(
    moves: BlockMoves, target: Target
) -> None:
    target.has_room.clear()
    save = Save(moves, [target], Staging(0))
    async with save as layers:
        await until(lambda: target.waiting > 0)
        layers.hurry()
        with pytest.raises(TimeoutError, match="no room"):
            async with asyncio.timeout(20):
                await asyncio.shield(save.running)


async def test_a_layer_that_comes_to_the_host_ends_no_other_ones_wait(
    moves: BlockMoves, target: Target, other: Target
) -> None:
    target.leads_there = False
    other.has_room.clear()
    save = Save(moves, [target, other], first_layers=1)
    async with save:
        await until(lambda: "a.key" in target.found and other.waiting > 0)
        await until_blocked(*save.puts)
        assert other.waiting == 1  # for the layer that it begins with, the last one
        other.has_room.set()
        await save.end()
        assert other.by_gpu[0] == "b.key"


async def test_a_target_that_takes_too_long_fails_and_is_not_served_by_the_host(
    moves: BlockMoves, target: Target
) -> None:
    target.error = TimeoutError("the peer does not answer")
    save = Save(moves, [target])
    async with save:
        with pytest.raises(TimeoutError, match="does not answer"):
            await save.end()
        assert not save.staging.copies


async def test_nobody_is_asked_for_memory_before_a_layer_is_computed(
    moves: BlockMoves, gpu: FakeDevice, target: Target
) -> None:
    gate = Gate()
    gpu.tensors.stream(0).add(gate)
    save = Save(moves, [target])
    async with save as layers:
        await until_blocked(*save.puts)
        assert layers.are_read and target.asked == 0
        gate.open()
        await save.end()
