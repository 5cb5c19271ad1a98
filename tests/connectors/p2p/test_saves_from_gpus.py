"""One save of blocks on a GPU, and targets that take its layers as a test says."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from asynckv.abc import InsertWriter
from asynckv.buffers.lookup import LookupBuffer
from asynckv.connectors.caches import BlockMoves, PagedCaches, Staging
from asynckv.connectors.engine import HEADER, EntryHeader
from asynckv.connectors.p2p.entries import Target as Destination
from asynckv.connectors.p2p.save import HostCopies, P2PSave, SavePath
from asynckv.connectors.requests import SaveRequest
from asynckv.devices.arena import DeviceArena
from asynckv.devices.copying import CopyPool
from asynckv.tensors.blocks import KVMemory
from asynckv.testing.blocked import until, until_blocked
from asynckv.transfers.routes import StagingWriter
from asynckv.transfers.source import StagedTensor
from asynckv.types import TensorSpec
from harness.device_memory import open_device_arena, region_in
from harness.fake_devices import FakeDevice, fake_device, lanes_of
from harness.fake_gpus.gates import Gate

POOL = torch.arange(32.0).view(8, 4)
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


def copies_of(few: BlockMoves, staging: Staging, came: list[str]) -> HostCopies:
    blocks_of = functools.partial(few.caches.blocks, block_ids=IDS)
    return HostCopies(few, staging, blocks_of, came.append)


@contextlib.asynccontextmanager
async def running(copies: HostCopies) -> AsyncIterator[asyncio.Task[None]]:
    """Let them be made meanwhile."""
    task = asyncio.create_task(copies.run())
    yield task
    task.cancel()
    await asyncio.wait({task})


@contextlib.asynccontextmanager
async def waiting_for_room(
    few: BlockMoves, staging: Staging, came: list[str]
) -> AsyncIterator[HostCopies]:
    """Ask for two layers where there is room for one: the second waits."""
    copies = copies_of(few, staging, came)
    for layer in "ab":
        copies.ask(layer, None)
    async with running(copies):
        await until(lambda: copies.waits_for_room)
        yield copies


async def test_layers_come_in_the_order_in_which_they_are_asked_for(
    few: BlockMoves,
) -> None:
    came, staging = list[str](), Staging(2 * SMALL)
    copies = copies_of(few, staging, came)
    for layer in "bab":
        copies.ask(layer, few.now())
    async with running(copies):
        copy = await copies.copy_of("a")
        assert came == ["b", "a"]
        assert copy.tensor("a", "a.key").tolist() == POOL[[5, 1]].tolist()
        copies.drop()
        assert staging.used_bytes == 0


async def test_where_there_is_no_room_it_waits_until_a_layer_is_dropped(
    few: BlockMoves,
) -> None:
    came: list[str] = []
    async with waiting_for_room(few, Staging(SMALL), came) as copies:
        assert came == ["a"]
        copies.drop("a")
        await copies.copy_of("b")
        assert (came, copies.waits_for_room) == (["a", "b"], False)


async def test_a_layer_that_nobody_needs_any_more_is_not_waited_for(
    few: BlockMoves,
) -> None:
    came, staging = list[str](), Staging(SMALL)
    async with waiting_for_room(few, staging, came) as copies:
        copies.drop("b")
        await until(lambda: copies.is_there("b"))
        assert (came, staging.copies) == (["a", "b"], 1)


async def test_layers_that_are_asked_for_together_come_together_or_not(
    few: BlockMoves,
) -> None:
    came, staging = list[str](), Staging(2 * SMALL - 1)
    copies = copies_of(few, staging, came)
    copies.ask("ab", None)
    async with running(copies):
        await until(lambda: copies.waits_for_room)
        assert (came, staging.used_bytes) == ([], 0)
        copies.drop("a")  # nobody needs it any more: there is room for the other one
        assert await copies.copy_of("b")
        assert (came, staging.used_bytes) == (["a", "b"], SMALL)


async def test_a_layer_that_nobody_needs_when_it_is_there_is_dropped(
    few: BlockMoves, slow: FakeDevice
) -> None:
    gate, staging = stop(slow), Staging(SMALL)
    copies = copies_of(few, staging, [])
    copies.ask("a", few.now())
    async with running(copies) as task:
        await until_blocked(task)
        copies.drop("a")
        gate.open()
        await until(lambda: copies.is_there("a"))
        assert staging.used_bytes == 0


async def test_it_fails_for_want_of_room_when_no_step_waits(
    few: BlockMoves,
) -> None:
    copies = copies_of(few, Staging(SMALL - 1), [])
    copies.may_wait_for_room = False
    copies.ask("a", None)
    with pytest.raises(TimeoutError, match="no room"):
        await copies.run()


async def test_cancelled_while_the_engine_computes_it_keeps_no_room(
    few: BlockMoves, slow: FakeDevice
) -> None:
    gate, staging = stop(slow), Staging(SMALL)
    copies = copies_of(few, staging, [])
    copies.ask("a", few.now())
    async with running(copies) as task:
        await until_blocked(task)
    assert (staging.used_bytes, slow.process.cuda.launches) == (0, 0)
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
    staging = Staging(SMALL)
    copies = copies_of(few, staging, [])
    copies.ask("a", None)
    gate = stop(slow)
    copies.ask("b", few.now())
    async with running(copies):
        await until(lambda: copies.waits_for_room)
        copies.drop("a")
        await until(lambda: staging.used_bytes > 0)
        assert not copies.waits_for_room
        gate.open()
        await copies.copy_of("b")


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
        self.may_put = asyncio.Event()
        self.may_put.set()
        self.is_putting = False
        self.leads_there = True
        self.error: Exception | None = None
        self.waiting = self.asked = 0
        self.by_gpu: list[str] = []
        self.found: dict[str, list[float]] = {}
        self._gpu, self._arena = gpu, arena

    async def put(self, name: str, tensor: KVMemory) -> None:
        assert isinstance(tensor, torch.Tensor)
        if name == HEADER:
            return
        self.is_putting = True
        await self.may_put.wait()
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


class Taking(LookupBuffer):
    """Has what is put at a target of a test's."""

    def __init__(self, target: Target) -> None:
        super().__init__("1MiB")
        self.target = target

    @contextlib.asynccontextmanager
    async def open_insert(
        self, *args: Any, specs: Mapping[str, TensorSpec] | None = None, **kwargs: Any
    ) -> AsyncIterator[InsertWriter]:
        yield self.target


ORDER = SaveRequest("r", "t", "", (1, 2, 3), IDS)
OF_P = EntryHeader(engine_id="P", rank=0, block_size=2, layers=("a", "b"))


@dataclasses.dataclass
class Save:
    """A save to ``targets`` whose layers are all offered, but for what is ``late``."""

    moves: BlockMoves
    targets: list[Target]
    staging: Staging = dataclasses.field(default_factory=lambda: Staging(AMPLE))
    path: SavePath = SavePath.GPU
    late: str = ""

    async def __aenter__(self) -> P2PSave:
        where: Any = {"path": self.path, "is_local": True}
        self.save = P2PSave(self.moves, ORDER, OF_P, 60, self.staging, **where)
        self.offer("".join(layer for layer in "ab" if layer not in self.late))
        targets = [self._to(Taking(target)) for target in self.targets]
        self.running = asyncio.create_task(self.save.run(targets))
        return self.save

    async def __aexit__(self, *exc_info: object) -> None:
        self.running.cancel()
        await asyncio.wait({self.running})
        self.save.end()
        await until(lambda: not self.staging.used_bytes)

    @staticmethod
    def _to(buffer: LookupBuffer) -> Destination:
        async def find() -> LookupBuffer:
            return buffer

        return find, "t", 1

    def offer(self, layers: str) -> None:
        mark = self.moves.now()
        for layer in layers:
            self.save.offer(layer, mark)

    async def end(self) -> None:
        """Wait until all is put, and look at every target."""
        self.offer(self.late)
        async with asyncio.timeout(20):
            await asyncio.shield(self.running)
        for target in self.targets:
            target.check()
        assert self.save.released.is_set()


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
    saving = Save(moves, [target])
    async with saving as save:
        await until(lambda: target.waiting > 0)
        assert save.lacks_room() and not save.is_copying
        target.has_room.set()
        await saving.end()
        assert not save.lacks_room() and target.by_gpu == ["a.key", "b.key"]


async def test_what_waits_for_host_memory_waits_for_somebody(
    moves: BlockMoves, target: Target
) -> None:
    saving = Save(moves, [target], Staging(LAYER_NBYTES - 1), SavePath.HOST)
    async with saving as save:
        await until(lambda: not save.is_copying)
        assert save.lacks_room()
        saving.staging.max_bytes = AMPLE
        saving.staging.release(0)
        await saving.end()
        assert save.is_copying


async def test_every_target_gets_what_came_to_the_host_once(
    moves: BlockMoves, target: Target, other: Target
) -> None:
    saving = Save(moves, [target, other], path=SavePath.HOST)
    async with saving as save:
        await saving.end()
        assert saving.staging.copies == 2 and not saving.staging.used_bytes
        assert save.nbytes == 4 * LAYER_NBYTES


async def test_who_waits_for_memory_of_the_gpu_ends_that_when_it_is_to_leave(
    moves: BlockMoves, target: Target
) -> None:
    target.has_room.clear()
    saving = Save(moves, [target], Staging(LAYER_NBYTES - 1))
    async with saving as save:
        await until(lambda: target.waiting > 0)
        save.move_to_host()
        await until(lambda: not target.waiting)  # though the host has no room yet
        saving.staging.max_bytes = AMPLE
        saving.staging.release(0)
        await saving.end()
        assert not target.by_gpu


async def test_layers_come_to_the_host_in_the_order_in_which_they_are_put(
    moves: BlockMoves, target: Target
) -> None:
    target.has_room.clear()
    saving = Save(moves, [target], Staging(LAYER_NBYTES), late="ab")
    async with saving as save:
        saving.offer("ba")
        await until(lambda: target.waiting > 0)
        save.move_to_host()
        await saving.end()  # there is room for the one that is put next, alone
        assert [*target.found] == ["b.key", "a.key"] and not target.by_gpu


async def test_what_is_put_does_not_come_to_the_host_any_more(
    moves: BlockMoves, target: Target
) -> None:
    saving = Save(moves, [target])
    async with saving as save:
        await until(save.released.is_set)
        save.move_to_host()
        await saving.end()
        assert saving.staging.copies == 0


async def test_in_a_hurry_it_does_not_wait_for_host_memory(
    moves: BlockMoves, target: Target
) -> None:
    target.has_room.clear()
    saving = Save(moves, [target], Staging(0))
    async with saving as save:
        await until(lambda: target.waiting > 0)
        save.stop_waiting()
        with pytest.raises(TimeoutError, match="no room"):
            await saving.end()


async def test_a_layer_that_comes_to_the_host_ends_no_other_ones_wait(
    moves: BlockMoves, target: Target, other: Target
) -> None:
    target.leads_there = False
    target.may_put.clear()
    saving = Save(moves, [target, other], Staging(0), late="b")
    async with saving:
        await until(lambda: other.by_gpu == ["a.key"])
        other.has_room.clear()
        saving.offer("b")
        await until(lambda: other.waiting > 0)
        saving.staging.max_bytes = LAYER_NBYTES  # so "b" does not come: see below
        saving.staging.release(0)
        await until(lambda: target.is_putting)
        await until_blocked(saving.running)
        assert other.waiting == 1
        other.has_room.set()
        await until(lambda: other.by_gpu == ["a.key", "b.key"])
        target.may_put.set()
        await saving.end()


async def test_who_waits_for_memory_of_the_gpu_takes_what_has_come_to_the_host(
    moves: BlockMoves, target: Target, other: Target
) -> None:
    target.leads_there = False
    other.has_room.clear()
    saving = Save(moves, [target, other])
    async with saving:
        await saving.end()
        assert not other.by_gpu and saving.staging.copies == 2


async def test_a_target_that_takes_too_long_fails_and_is_not_served_by_the_host(
    moves: BlockMoves, target: Target
) -> None:
    target.error = TimeoutError("the peer does not answer")
    saving = Save(moves, [target])
    async with saving:
        with pytest.raises(TimeoutError, match="does not answer"):
            await saving.end()
        assert not saving.staging.copies


async def test_nobody_is_asked_for_memory_before_a_layer_is_computed(
    moves: BlockMoves, gpu: FakeDevice, target: Target
) -> None:
    gate = stop(gpu)
    saving = Save(moves, [target])
    async with saving as save:
        await until_blocked(saving.running)
        assert not save.released.is_set() and target.asked == 0
        gate.open()
        await saving.end()
