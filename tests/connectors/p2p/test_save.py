from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import torch

from asynckv.abc import InsertWriter
from asynckv.buffers.lookup import LookupBuffer
from asynckv.connectors.caches import BlockMoves, PagedCaches, Staging
from asynckv.connectors.engine import EntryHeader, NotSaved
from asynckv.connectors.p2p.entries import Target, report_failure
from asynckv.connectors.p2p.save import P2PSave, SavePath
from asynckv.connectors.requests import SaveRequest
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import Event
from asynckv.errors import EntryConflict
from asynckv.tensors.blocks import KVMemory
from asynckv.testing.blocked import until, until_blocked
from asynckv.types import TensorSpec
from asynckv.waits.waiting import wait_shielded
from harness.fake_devices import fake_device, lanes_of

ORDER = SaveRequest("r", "t", "", (1, 2, 3), ((2, 0),))
HEADER = EntryHeader(engine_id="P", rank=0, block_size=2, layers=("a", "b"))


def save_of(room: int = 2**20) -> tuple[P2PSave, PagedCaches, Staging]:
    """Return one that has so much room for copies in host memory."""
    caches = PagedCaches({layer: torch.arange(8.0).view(4, 2) for layer in "ab"}, None)
    moves, staging = BlockMoves(caches, CopyPool()), Staging(room)
    return P2PSave(moves, ORDER, HEADER, 60, staging), caches, staging


def to(buffer: LookupBuffer) -> Target:
    async def find() -> LookupBuffer:
        return buffer

    return find, "t", 1


def begin(save: P2PSave, *buffers: LookupBuffer) -> asyncio.Task[None]:
    return asyncio.create_task(save.run([to(one) for one in buffers]))


async def test_each_layer_leaves_as_soon_as_it_is_offered() -> None:
    save, _, _ = save_of()
    async with LookupBuffer("16MiB") as buffer:
        save.offer("b")
        saving = begin(save, buffer)
        async with buffer.open_drop_select(entry_id="t") as stream:
            b = await stream.wait_for("b.key")
            assert b.tolist() == [[4, 5], [0, 1]]
            assert EntryHeader.of(await stream.wait_for("extras.asynckv")) == HEADER
            save.offer("b")
            save.offer_rest()
            await saving
            await stream.wait_for("a.key")
        assert save.nbytes == 2 * 16


async def test_a_cancelled_save_is_no_entry() -> None:
    save, _, _ = save_of()
    async with LookupBuffer("16MiB") as buffer:
        saving = begin(save, buffer)
        save.offer("a")
        await asyncio.sleep(0)
        saving.cancel()
        await asyncio.wait([saving])
        assert await buffer.peek([1, 2, 3]) == 0


async def test_nobody_to_save_for_is_no_work() -> None:
    save, _, _ = save_of()
    await save.run([])


@pytest.mark.parametrize("is_early", [False, True])
async def test_who_waits_for_what_was_not_saved_learns_why(is_early: bool) -> None:
    async with LookupBuffer("16MiB", drain_s=0) as buffer:

        async def ask() -> None:
            async with buffer.drop_select(entry_id="t") as entry:
                EntryHeader.of(entry.extras["asynckv"]).check_saved()

        asking = asyncio.create_task(ask()) if is_early else None
        await asyncio.sleep(0)
        await report_failure(to(buffer), (1, 2, 3), HEADER, "too\nlarge", 60)
        with pytest.raises(NotSaved, match="P/0 has not saved it: too.*large"):
            await (asking or ask())


async def test_what_was_saved_whole_stays_whole() -> None:
    async with LookupBuffer("16MiB", drain_s=0) as buffer:
        await buffer.insert([1, 2, 3], None, torch.ones(3), None, None, entry_id="t")
        with pytest.raises(EntryConflict):
            await report_failure(to(buffer), (1, 2, 3), HEADER, "another failed", 60)
        assert await buffer.peek([1, 2, 3]) == 3


class Marked(BlockMoves):
    """A stream that gets to each of its marks when ``got_there`` is set."""

    def __init__(self, caches: PagedCaches) -> None:
        super().__init__(caches, CopyPool())
        self.got_there = asyncio.Event()
        self.waited_for: list[object] = []

    async def reached(self, mark: Event | None) -> None:
        self.waited_for.append(mark)
        await self.got_there.wait()


class Slow(LookupBuffer):
    """Reads what is put when it may, and is not to be hurried by a cancellation."""

    def __init__(self) -> None:
        super().__init__("1MiB")
        self.may_read = asyncio.Event()
        self.read: dict[str, list[list[float]]] = {}

    @contextlib.asynccontextmanager
    async def open_insert(
        self, *args: Any, specs: Mapping[str, TensorSpec] | None = None, **kwargs: Any
    ) -> AsyncIterator[InsertWriter]:
        yield SlowWriter(self)


class SlowWriter(InsertWriter):
    def __init__(self, buffer: Slow) -> None:
        self.entry_id, self.buffer = "t", buffer

    async def put(self, name: str, tensor: KVMemory) -> None:
        if not name.endswith(".key"):
            return
        waiting = asyncio.create_task(self.buffer.may_read.wait())
        try:
            await asyncio.shield(waiting)
        finally:
            await asyncio.wait({waiting})
            if isinstance(tensor, torch.Tensor):
                self.buffer.read[name] = tensor.tolist()


async def test_blocks_are_put_once_the_stream_has_got_to_their_layer() -> None:
    _, caches, _ = save_of()
    marks: dict[str, Any] = {"a": "mark of a", "b": "mark of b"}
    moves = Marked(caches)
    save = P2PSave(moves, ORDER, HEADER, 60, Staging(0))
    async with LookupBuffer("16MiB", drain_s=0) as buffer:
        saving = begin(save, buffer)
        for layer, mark in marks.items():
            save.offer(layer, mark)
        await until_blocked(saving)
        assert moves.waited_for == ["mark of a"] and save.nbytes == 0
        moves.got_there.set()
        await saving
        assert moves.waited_for == ["mark of a", "mark of b"]


async def test_blocks_are_read_until_the_last_put_has_let_go_of_them() -> None:
    save, caches, staging = save_of()
    async with Slow() as buffer:
        saving = begin(save, buffer)
        save.offer_rest()
        await until_blocked(saving)
        for _ in range(2):
            save.move_to_host()
        await until(lambda: staging.copies == 1 and not save.is_copying)
        assert not save.released.is_set() and staging.used_bytes == save.nbytes + 32
        buffer.may_read.set()
        async with asyncio.timeout(10):
            await save.released.wait()
            for layer in caches.layers:
                caches.pools(layer)[0].zero_()
            await saving
        assert buffer.read == {f"{one}.key": [[4, 5], [0, 1]] for one in "ab"}
        assert (staging.used_bytes, staging.copies) == (0, 1)


async def test_blocks_are_read_until_all_targets_have_them() -> None:
    save, _, staging = save_of(room=15)  # a layer has 16 bytes
    async with LookupBuffer("16MiB", drain_s=0) as quick, Slow() as slow:
        saving = begin(save, quick, slow)
        save.offer_rest()
        await until_blocked(saving)
        save.move_to_host()
        await until_blocked(saving)
        assert not save.released.is_set() and not save.is_copying
        slow.may_read.set()  # what is lent may be put though it is wanted back
        await saving
        assert save.released.is_set() and not staging.copies


async def test_a_save_that_has_ended_reads_nothing_and_keeps_no_copy() -> None:
    save, _, staging = save_of()
    async with Slow() as buffer:
        saving = begin(save, buffer)
        save.offer_rest()
        await until_blocked(saving)
        save.move_to_host()
        await until(lambda: staging.copies == 1)
        buffer.may_read.set()
        saving.cancel()
        await asyncio.wait([saving])
        save.end()
    assert save.released.is_set() and staging.used_bytes == 0


@pytest.mark.parametrize("is_prepared", [False, True])
async def test_blocks_that_nobody_reads_yet_are_left_once_there_is_a_copy(
    is_prepared: bool,
) -> None:
    save, _, _ = save_of()

    async def never() -> LookupBuffer:
        await asyncio.Event().wait()
        raise AssertionError

    async def prepare() -> None:
        if not is_prepared:
            await never()

    running = save.run([(never, "t", 1)], prepare=prepare)
    saving = asyncio.create_task(running)
    save.offer_rest()
    await until_blocked(saving)
    assert not save.released.is_set()
    save.move_to_host()
    await until(save.released.is_set)
    saving.cancel()
    await asyncio.wait([saving])
    save.end()


class Held(BlockMoves):
    """Reads blocks for a copy until it may end, whoever does not need it any more."""

    may_end: asyncio.Event
    has_begun = False

    async def gather(self, *args: Any) -> None:
        self.has_begun = True
        await wait_shielded(asyncio.ensure_future(self.may_end.wait()))


async def test_blocks_are_read_while_they_are_copied_for_nobody() -> None:
    _, caches, _ = save_of()
    moves, staging = Held(caches, CopyPool()), Staging(2**20)
    moves.may_end = asyncio.Event()
    save = P2PSave(moves, ORDER, HEADER, 60, staging)
    async with Slow() as buffer:
        saving = begin(save, buffer)
        save.offer_rest()
        save.move_to_host()
        await until(lambda: moves.has_begun)
        buffer.may_read.set()
        await until(lambda: save.nbytes == 32)  # all is put
        await until_blocked(saving)
        assert not save.released.is_set() and not saving.done()
        moves.may_end.set()
        await saving  # and then it is over: whoever runs it says so
        save.end()
        assert save.released.is_set() and not staging.used_bytes


@contextlib.asynccontextmanager
async def save_on_gpu(
    room: int, *, is_local: bool = False
) -> AsyncIterator[tuple[P2PSave, BlockMoves, Staging]]:
    """Yield a save of blocks on a GPU; it keeps no host memory once it has ended."""
    with fake_device() as gpu:
        pool = CopyPool(lanes=lanes_of(gpu))
        layers = {one: gpu.tensor(torch.arange(8.0).view(4, 2)) for one in "ab"}
        moves, staging = BlockMoves(PagedCaches(layers, None), pool), Staging(room)
        where: Any = {"path": SavePath.HOST, "is_local": is_local}
        save = P2PSave(moves, ORDER, HEADER, 60, staging, **where)
        yield save, moves, staging
        save.end()
        assert staging.used_bytes == 0
        pool.close()
        await until(
            lambda: not any("asynckv-" in t.name for t in threading.enumerate())
        )


async def test_blocks_of_a_gpu_come_to_the_host_once_and_are_put_from_there() -> None:
    async with (
        save_on_gpu(2**20) as (save, moves, _),
        LookupBuffer("16MiB", drain_s=0) as buffer,
    ):
        saving = begin(save, buffer)
        for layer in "ab":
            save.offer(layer, moves.mark())
        await asyncio.wait_for(saving, 10)
        assert save.released.is_set() and save.nbytes == 32
        entry = await buffer.drop_select(entry_id="t")
        assert isinstance(entry.key, Mapping)
        assert entry.key.keys() == {"a", "b"}
        assert entry.key["b"].tolist() == [[4, 5], [0, 1]]


@pytest.mark.parametrize("room", [0, 2**20])
async def test_a_cancelled_save_of_a_gpu_keeps_no_host_memory(room: int) -> None:
    async def find() -> LookupBuffer:
        if room:  # the copy waits for who is dialled, not the other way round
            await asyncio.get_running_loop().create_future()
        return buffer

    async with (
        save_on_gpu(room, is_local=True) as (save, moves, staging),
        LookupBuffer("16MiB", drain_s=0) as buffer,
    ):
        saving = asyncio.create_task(save.run([(find, "t", 1)]))
        save.offer("a", moves.mark())
        await until(lambda: staging.copies == bool(room))
        await until(lambda: buffer.statistics().entries == (not room))
        await until_blocked(saving)
        assert save.lacks_room() and not save.is_copying
        saving.cancel()
        await asyncio.wait({saving})


async def test_in_a_hurry_a_save_of_a_gpu_does_not_wait_for_host_memory() -> None:
    async with (
        save_on_gpu(0) as (save, moves, _),
        LookupBuffer("16MiB", drain_s=0) as buffer,
    ):
        saving = begin(save, buffer)
        await until(lambda: buffer.statistics().entries == 1)
        save.offer("a", moves.mark())
        save.stop_waiting()
        with pytest.raises(TimeoutError, match="no room"):
            await asyncio.wait_for(saving, 20)
