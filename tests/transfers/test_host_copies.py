from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy
import pytest

from asynckv.devices.arena import DeviceArena, DeviceRegion
from asynckv.devices.copying import CopyPool
from asynckv.errors import GPUFailed
from asynckv.protocol.wire import digest_of
from asynckv.tensors.feeds import Feed
from asynckv.tensors.views import bytes_of, tensor_over
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.host_copies import D2HCopier, HostCopies, HostCopy
from asynckv.transfers.source import HostSource, RegionSource
from asynckv.types import TensorSpec
from asynckv.waits.waiting import OwnTasks
from harness.device_memory import (
    filled_region,
    open_device_arena,
)
from harness.fake_devices import FakeDevice
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import open_gpu_pair


async def test_memory_counts_until_the_last_view_of_it_is_gone() -> None:
    copies = HostCopies(10)
    memory = await copies.empty(6)
    view = memory[2:4]
    del memory
    await asyncio.sleep(0)
    assert copies.used_bytes == 6
    del view
    await until(lambda: not copies.used_bytes)


async def test_who_asked_first_is_first() -> None:
    copies = HostCopies(10)
    memory = [await copies.empty(6)]
    large, small = (asyncio.create_task(copies.empty(n)) for n in (8, 1))
    await until_blocked(large, small)
    memory.clear()
    assert (await large).nbytes == 8 and (await small).nbytes == 1


async def test_what_is_longer_than_the_bound_is_alone() -> None:
    copies = HostCopies(10)
    memory = [await copies.empty(1)]
    longer, other = (asyncio.create_task(copies.empty(n)) for n in (20, 1))
    await until_blocked(longer, other)
    memory.clear()
    memory.append(await longer)
    del longer
    await until_blocked(other)
    assert copies.used_bytes == 20
    memory.clear()
    await other


async def test_what_is_nothing_has_memory_all_the_same() -> None:
    assert (await HostCopies(0).empty(0)).nbytes == 0


async def test_views_may_end_in_any_thread() -> None:
    copies = HostCopies(10)
    memory = [await copies.empty(6)]
    thread = threading.Thread(target=memory.clear)
    thread.start()
    thread.join()
    await until(lambda: not copies.used_bytes)


def test_views_may_outlive_the_loop() -> None:
    async def take() -> memoryview:
        return await HostCopies(10).empty(6)

    assert asyncio.run(take()).nbytes == 6


async def test_memory_that_cannot_be_had_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*anything: object) -> None:
        raise MemoryError

    copies = HostCopies(10)
    with monkeypatch.context() as patch:
        patch.setattr(numpy, "empty", refuse)
        with pytest.raises(MemoryError):
            await copies.empty(6)
    assert not copies.used_bytes


@pytest.mark.parametrize("mode", ["task", "scope", "again", "completion"])
async def test_a_cancelled_wait_leaves_no_trace(mode: CancelMode) -> None:
    copies = HostCopies(10)
    held = list[memoryview]()

    async def hold() -> None:
        held.append(await copies.empty(10))
        asyncio.get_running_loop().call_soon(held.clear)

    async def take() -> None:
        await copies.empty(6)  # and forgotten

    async def check(k: int, how: CancelMode, outcome: Outcome[None]) -> None:
        held.clear()
        await until(lambda: not copies.used_bytes)
        assert not copies._line

    await sweep_cancellation(take, check, before=hold, modes=(mode,))


async def test_one_that_waits_no_longer_lets_the_next_one_go_on() -> None:
    copies = HostCopies(10)
    memory = await copies.empty(6)
    large, small = (asyncio.create_task(copies.empty(n)) for n in (8, 1))
    await until_blocked(large, small)
    large.cancel()
    assert (await small).nbytes == 1
    assert memory.nbytes == 6


async def test_a_peer_that_never_reads_has_no_more_than_the_bound_in_host_memory(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, arrays = HostCopies.empty, list[weakref.ref[Any]]()
    most = 0

    async def noted(copies: HostCopies, nbytes: int) -> memoryview:
        nonlocal most
        memory = await empty(copies, nbytes)
        arrays.append(weakref.ref(memory.obj))
        alive = [array for ref in arrays if (array := ref()) is not None]
        most = max(most, sum(array.nbytes for array in alive))
        return memory

    monkeypatch.setattr(HostCopies, "empty", noted)
    async with open_gpu_pair(gpus, device=None, url="?payload=inline") as pair:
        link = pair.peer._linked()
        monkeypatch.setattr(link.payload._lanes, "receive", lambda: None)  # type: ignore[attr-defined]
        (services,), copies = pair.server._services, pair.devices.copies
        copies.max_bytes = 2 * MIB
        layers = {str(n): noise(MIB, n) for n in range(15)}
        await pair.buffer.insert([1], None, layers, None, None)
        selecting = asyncio.create_task(pair.peer.lookup.drop_select([1]))
        await until(lambda: most == 2 * MIB and bool(copies._line))
        assert services.lookup is not None
        tasks = [t for t in asyncio.all_tasks() if "asynckv: transfer" in t.get_name()]
        assert len(tasks) == len(services.lookup.tasks)
        await until_blocked(selecting, *tasks)
        assert most == copies.used_bytes == 2 * MIB
        selecting.cancel()
        await until(lambda: not copies._line)
        pair.peer.abort()
        await until(lambda: not copies.used_bytes)
    assert most == 2 * MIB


SPEC = TensorSpec((MIB,), "uint8")
PIECE = MIB // 4


@pytest.fixture
def arena(gpu: FakeDevice) -> Iterator[DeviceArena]:
    with open_device_arena(gpu) as arena:
        yield arena


def refuse(told: object) -> None:
    raise AssertionError(told)


def whole(copy: HostCopy) -> memoryview:
    assert isinstance(copy, memoryview)
    return copy


class Fed:
    """Whoever is given a feed, and takes its pieces out when it likes."""

    def __init__(self) -> None:
        self.feeds: list[Feed] = []
        self.content = b""

    def __call__(self, copy: HostCopy) -> None:
        assert isinstance(copy, Feed)
        self.feeds.append(copy)

    @property
    def ahead(self) -> int:
        """What has come of the first one, and was not taken."""
        return self.feeds[0].fed_bytes - len(self.content) if self.feeds else 0

    def take(self) -> None:
        """Take what has come of the first one."""
        feed, start = self.feeds[0], len(self.content)
        self.content += b"".join(map(bytes, feed.pieces(start, feed.fed_bytes)))
        feed.discard(feed.fed_bytes)


async def filled(arena: DeviceArena, pool: CopyPool, seed: int) -> RegionSource:
    return RegionSource(await filled_region(arena, pool, noise(MIB, seed)), SPEC)


def free(arena: DeviceArena, *sources: RegionSource) -> None:
    arena.free([source.region for source in sources])


async def test_copies_are_in_host_memory_and_come_in_turn(
    arena: DeviceArena, pool: CopyPool
) -> None:
    copier, copies = D2HCopier(pool, HostCopies()), list[HostCopy]()
    sources = [await filled(arena, pool, seed) for seed in (1, 2)]
    await asyncio.gather(*(copier.copy(one, copies.append) for one in sources))
    first, second = (tensor_over(whole(copy), SPEC) for copy in copies)
    assert is_same(first, noise(MIB, 1)) and is_same(second, noise(MIB, 2))
    free(arena, *sources)


async def test_what_cannot_be_read_is_raised(
    arena: DeviceArena, pool: CopyPool
) -> None:
    source, copies = await filled(arena, pool, 1), HostCopies()
    free(arena, source)
    with pytest.raises(RuntimeError, match="released"):
        await D2HCopier(pool, copies).copy(source, refuse)
    with pytest.raises(RuntimeError, match="released"):
        await D2HCopier(pool, copies).digest(source)
    await until(lambda: not copies.used_bytes)


async def test_a_cancelled_copy_tells_nobody(
    arena: DeviceArena, pool: CopyPool
) -> None:
    copies = HostCopies()
    copier, source = D2HCopier(pool, copies), await filled(arena, pool, 1)
    tasks = [asyncio.create_task(copier.copy(source, refuse)) for _ in range(2)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    await until(lambda: not copies.used_bytes)  # though the tasks are kept
    free(arena, source)


async def test_a_copy_that_fails_on_its_gpu_is_kept_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
    gpu: FakeDevice,
    arena: DeviceArena,
    pool: CopyPool,
) -> None:
    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    copies, errors = HostCopies(), list[Exception]()
    source, tasks = await filled(arena, pool, 1), OwnTasks(errors.append)
    copier = D2HCopier(pool, copies)
    with monkeypatch.context() as patch:
        patch.setattr(gpu.process.cuda, "copy", fail)
        tasks.start(partial(copier.copy, source, refuse), "copy")
        await tasks.wait()
    await until(lambda: not copies.used_bytes)
    assert "off the bus" in str(errors[0])
    free(arena, source)


async def test_who_cannot_be_given_a_copy_raises_that(
    arena: DeviceArena, pool: CopyPool
) -> None:
    def fail(given: object) -> None:
        raise MemoryError

    copies, errors = HostCopies(), list[Exception]()
    source, tasks = await filled(arena, pool, 1), OwnTasks(errors.append)
    copier = D2HCopier(pool, copies)
    tasks.start(partial(copier.copy, source, fail), "copy")
    await tasks.wait()
    assert [type(error) for error in errors] == [MemoryError]
    await until(lambda: not copies.used_bytes)
    free(arena, source)


async def test_each_copy_waits_until_others_are_gone(
    arena: DeviceArena, pool: CopyPool
) -> None:
    copier, copies = D2HCopier(pool, HostCopies(MIB)), list[HostCopy]()
    sources = [await filled(arena, pool, seed) for seed in (1, 2)]
    tasks = [
        asyncio.create_task(copier.copy(source, copies.append)) for source in sources
    ]
    await until(lambda: bool(copies))
    await until_blocked(*tasks)
    assert len(copies) == 1
    copies.clear()
    await asyncio.wait(tasks)
    assert len(copies) == 1
    free(arena, *sources)


async def test_a_digest_waits_for_no_copy_to_be_sent(
    arena: DeviceArena, pool: CopyPool
) -> None:
    copier, copies = D2HCopier(pool, HostCopies(MIB)), list[HostCopy]()
    source = await filled(arena, pool, 1)
    await copier.copy(source, copies.append)
    waiting = asyncio.create_task(copier.copy(source, copies.append))
    await until_blocked(waiting)
    assert await copier.digest(source) == digest_of(bytes_of(noise(MIB, 1)))
    assert len(copies) == 1
    copies.clear()
    await waiting
    free(arena, source)


@pytest.mark.usefixtures("small_pieces")
async def test_a_long_part_is_fed_as_far_as_there_is_room(
    arena: DeviceArena, pool: CopyPool
) -> None:
    copies, fed = HostCopies(2 * PIECE), Fed()
    source = await filled(arena, pool, 1)
    assert isinstance(source.region, DeviceRegion)
    source.region.edges = b""
    copier = D2HCopier(pool, copies, 1)
    task = asyncio.create_task(copier.copy(source, fed))
    while len(fed.content) < MIB:
        await until(lambda: fed.ahead >= min(2 * PIECE, MIB - len(fed.content)))
        await until_blocked(task)
        assert max(fed.ahead, copies.used_bytes) <= 2 * PIECE
        fed.take()
    await task
    assert fed.content == bytes(noise(MIB, 1).tolist())
    assert not source.region.edges  # those of a piece are not its own
    await until(lambda: not copies.used_bytes)
    free(arena, source)


@pytest.mark.usefixtures("small_pieces")
async def test_as_many_parts_are_fed_at_a_time_as_may_be(
    arena: DeviceArena, pool: CopyPool
) -> None:
    copies, fed = HostCopies(3 * PIECE), Fed()
    sources = [await filled(arena, pool, seed) for seed in (1, 2, 3)]
    copier = D2HCopier(pool, copies, 2)
    tasks = [asyncio.create_task(copier.copy(source, fed)) for source in sources]
    await until(lambda: sorted(x.fed_bytes for x in fed.feeds) == [PIECE, 2 * PIECE])
    await until_blocked(*tasks)
    assert len(fed.feeds) == 2
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    fed.feeds.clear()
    await until(lambda: not copies.used_bytes)  # though the tasks are kept
    free(arena, *sources)


@pytest.mark.usefixtures("small_pieces")
async def test_what_fails_while_it_is_fed_is_told(
    monkeypatch: pytest.MonkeyPatch,
    gpu: FakeDevice,
    arena: DeviceArena,
    pool: CopyPool,
) -> None:
    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    copies, fed, errors = HostCopies(2 * PIECE), Fed(), list[Exception]()
    source, tasks = await filled(arena, pool, 1), OwnTasks(errors.append)
    copier = D2HCopier(pool, copies, 1)
    tasks.start(partial(copier.copy, source, fed), "copy")
    await until(lambda: bool(fed.feeds) and fed.feeds[0].fed_bytes == 2 * PIECE)
    with monkeypatch.context() as patch:
        patch.setattr(gpu.process.cuda, "copy", fail)
        fed.take()
        await tasks.wait()
    assert "off the bus" in str(errors[0])
    fed.feeds.clear()
    await until(lambda: not copies.used_bytes)
    free(arena, source)


@pytest.mark.usefixtures("small_pieces")
async def test_what_is_in_host_memory_is_not_fed(pool: CopyPool) -> None:
    with pytest.raises(TypeError, match="lies on a GPU"):
        await D2HCopier(pool, HostCopies(), 1).copy(HostSource(noise(MIB)), refuse)
