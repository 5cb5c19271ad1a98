"""The layers of one save on a GPU, and targets that take them as a test says."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
import torch

from asynckv.connectors.caches import BlockMoves, PagedCaches, Staging
from asynckv.connectors.p2p.gpu_layers import GpuLayers, LayerGathering
from asynckv.devices.arena import DeviceArena
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import Event
from asynckv.tensors.blocks import KVBlocks, KVMemory
from asynckv.testing.blocked import until, until_blocked
from asynckv.transfers.routes import StagingWriter
from asynckv.transfers.source import StagedTensor
from asynckv.types import TensorSpec
from harness.device_memory import open_device_arena, region_in
from harness.fake_devices import FakeDevice, fake_device, lanes_of
from harness.fake_gpus.gates import Gate

POOL = torch.arange(32.0).view(8, 4)
BLOCKS = {layer: {f"{layer}.key": KVBlocks(POOL, (5, 1))} for layer in "ab"}
NBYTES = 2 * 2 * 16


def moves_of() -> BlockMoves:
    return BlockMoves(PagedCaches({"a": POOL}, None), CopyPool())


async def test_copies_are_what_the_blocks_were() -> None:
    staging, pool = Staging(NBYTES), POOL.clone()
    blocks = {"a": {"a.key": KVBlocks(pool, (5, 1))}}
    copy = await staging.copy(blocks, moves_of())
    assert copy is not None
    pool.zero_()
    assert copy.tensor("a", "a.key").tolist() == POOL[[5, 1]].tolist()


async def test_what_does_not_fit_is_not_copied_until_something_is_dropped() -> None:
    staging, moves = Staging(NBYTES), moves_of()
    copy = await staging.copy(BLOCKS, moves)
    assert copy is not None and staging.used_bytes == NBYTES
    assert await staging.copy(BLOCKS, moves) is None
    copy.drop("a")
    copy.drop("a")
    assert staging.used_bytes == NBYTES // 2
    assert await staging.copy(BLOCKS, moves) is None
    copy.drop()
    assert staging.used_bytes == 0
    assert await staging.copy(BLOCKS, moves) is not None
    assert staging.copies == 2


async def test_megabytes_that_are_dropped_are_not_freed_on_the_loop() -> None:
    large, moves, freed_by = torch.zeros(4, 2**20), moves_of(), list[int]()
    copy = await Staging(2**30).copy({"a": {"a.key": KVBlocks(large, (3, 0))}}, moves)
    assert copy is not None
    weakref.finalize(
        copy.tensor("a", "a.key"), lambda: freed_by.append(threading.get_ident())
    )
    copy.drop()
    await until(lambda: bool(freed_by))
    assert freed_by != [threading.get_ident()]
    moves.pool.close()


class Stuck(BlockMoves):
    """Gathers until it is cancelled."""

    async def gather(
        self,
        sources: Sequence[KVBlocks],
        targets: Sequence[torch.Tensor],
        mark: Event | None,
    ) -> None:
        await asyncio.Event().wait()


async def test_a_cancelled_copy_takes_no_room() -> None:
    staging, stuck = Staging(NBYTES), Stuck(moves_of().caches, CopyPool())
    copying = asyncio.create_task(staging.copy(BLOCKS, stuck))
    await until_blocked(copying)
    assert staging.used_bytes == NBYTES
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert await staging.copy(BLOCKS, moves_of()) is not None
    assert staging.copies == 1


async def test_who_waits_for_room_is_told_of_what_is_dropped() -> None:
    staging = Staging(NBYTES)
    copy = await staging.copy(BLOCKS, moves_of())
    assert copy is not None
    before = staging.more_room
    copy.drop("a")
    assert before.is_set() and not staging.more_room.is_set()


IDS = ((5, 1),)
SMALL = 2 * 4 * 4


@contextlib.asynccontextmanager
async def moves_on(
    gpu: FakeDevice, *contents: torch.Tensor
) -> AsyncIterator[BlockMoves]:
    """Yield what moves blocks of the layers a and b, which hold these."""
    pool = CopyPool(lanes=lanes_of(gpu))
    pools = {layer: gpu.tensor(one) for layer, one in zip("ab", contents, strict=True)}
    yield (moves := BlockMoves(PagedCaches(pools, None), pool))
    moves.close()
    pool.close()
    await until(lambda: not any("asynckv-" in t.name for t in threading.enumerate()))


@pytest.fixture
def slow() -> Iterator[FakeDevice]:
    with fake_device(seed=5, max_delay=2) as slow:
        yield slow


@pytest.fixture
async def few(slow: FakeDevice) -> AsyncIterator[BlockMoves]:
    async with moves_on(slow, POOL, POOL) as moves:
        yield moves


def stop(gpu: FakeDevice) -> Gate:
    """Let the engine's stream stop here."""
    gpu.tensors.stream(0).add(gate := Gate())
    return gate


def gathering_of(few: BlockMoves, room: int, came: list[str]) -> LayerGathering:
    blocks_of = functools.partial(few.caches.blocks, block_ids=IDS)
    return LayerGathering(few, Staging(room), blocks_of, came.append)


async def waiting_for_room(
    few: BlockMoves, came: list[str]
) -> tuple[LayerGathering, asyncio.Task[None]]:
    """Gather two layers where there is room for one: the second waits."""
    gathering = gathering_of(few, SMALL, came)
    for layer in "ab":
        gathering.offer(layer, None)
    gathering.finish()
    running = asyncio.create_task(gathering.run())
    await until(lambda: gathering.is_waiting_for_room)
    return gathering, running


async def test_layers_come_in_the_order_of_their_offers(
    few: BlockMoves,
) -> None:
    came: list[str] = []
    gathering = gathering_of(few, 2 * SMALL, came)
    for layer in "ba":
        gathering.offer(layer, few.now())
    gathering.finish()
    await gathering.run()
    assert came == ["b", "a"]
    found = gathering.copy_of("a").tensor("a", "a.key")
    assert found.tolist() == torch.arange(32.0).view(8, 4)[[5, 1]].tolist()
    gathering.drop()
    assert gathering._staging.used_bytes == 0


async def test_where_there_is_no_room_it_waits_until_a_layer_is_dropped(
    few: BlockMoves,
) -> None:
    came: list[str] = []
    gathering, running = await waiting_for_room(few, came)
    assert came == ["a"]
    gathering.drop("a")
    await running
    assert (came, gathering.is_waiting_for_room) == (["a", "b"], False)


async def test_a_layer_that_nobody_needs_any_more_is_not_waited_for(
    few: BlockMoves,
) -> None:
    came: list[str] = []
    gathering, running = await waiting_for_room(few, came)
    gathering.drop("b")
    await running
    assert (came, gathering._staging.copies) == (["a", "b"], 1)
    gathering.drop()


async def test_a_layer_that_nobody_needs_when_it_is_there_is_dropped(
    few: BlockMoves, slow: FakeDevice
) -> None:
    gate = stop(slow)
    came: list[str] = []
    gathering = gathering_of(few, SMALL, came)
    gathering.offer("a", few.now())
    gathering.finish()
    running = asyncio.create_task(gathering.run())
    await until_blocked(running)
    gathering.drop("a")
    gate.open()
    await running
    assert (came, gathering._staging.used_bytes) == (["a"], 0)


async def test_it_fails_for_want_of_room_when_no_step_waits(
    few: BlockMoves,
) -> None:
    gathering = gathering_of(few, SMALL - 1, [])
    gathering.may_wait_for_room = False
    gathering.offer("a", None)
    with pytest.raises(TimeoutError, match="no room"):
        await gathering.run()


async def test_cancelled_while_the_engine_computes_it_keeps_no_room(
    few: BlockMoves, slow: FakeDevice
) -> None:
    gate = stop(slow)
    gathering = gathering_of(few, SMALL, [])
    gathering.offer("a", few.now())
    running = asyncio.create_task(gathering.run())
    await until_blocked(running)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (gathering._staging.used_bytes, slow.process.cuda.launches) == (0, 0)
    gate.open()


async def test_nothing_is_scattered_before_what_the_stream_still_reads(
    few: BlockMoves, slow: FakeDevice
) -> None:
    gate = stop(slow)
    blocks = few.caches.blocks("a", IDS)["a.key"]
    scattering = few.scatter([torch.zeros(2, 4)], [blocks], few.now())
    running = asyncio.create_task(scattering)
    await until_blocked(running)
    others = few.caches.blocks("b", IDS)["b.key"]
    for _ in range(3):
        await few.scatter([torch.ones(2, 4)], [others], None)
    assert few.caches.pools("a")[0].cpu()[5].tolist() == [20, 21, 22, 23]
    gate.open()
    await running
    assert not few.caches.pools("a")[0].cpu()[[5, 1]].any()


async def test_it_waits_for_room_no_longer_when_it_copies(
    few: BlockMoves, slow: FakeDevice
) -> None:
    gathering = gathering_of(few, SMALL, [])
    gathering.offer("a", None)
    gate = stop(slow)
    gathering.offer("b", few.now())
    gathering.finish()
    running = asyncio.create_task(gathering.run())
    await until(lambda: gathering.is_waiting_for_room)
    gathering.drop("a")
    await until(lambda: gathering._staging.used_bytes > 0)
    assert not gathering.is_waiting_for_room
    gate.open()
    await running


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
    content = torch.arange(8.0 * WIDTH).view(8, WIDTH)
    async with moves_on(gpu, content, content + 1) as moves:
        yield moves


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
        layers.move_to_host()
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
        layers.move_to_host()
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
        layers.stop_waiting()
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
        # Once the first has "b" too it comes to the host, where a copy is for all.
        await until(lambda: bool(other.by_gpu))
        await save.end()
        assert other.by_gpu == ["b.key"]


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
    gate = stop(gpu)
    save = Save(moves, [target])
    async with save as layers:
        await until_blocked(*save.puts)
        assert layers.are_read and target.asked == 0
        gate.open()
        await save.end()
