from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from asynckv.errors import GPUFailed
from asynckv.tensors.arena import Region
from asynckv.tensors.device_arena import DeviceArena
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.device_regions import DeviceRegion
from asynckv.tensors.feeds import Feed
from asynckv.tensors.views import tensor_over
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.host_copies import Hoisting, HostCopies, HostCopy
from asynckv.types import TensorSpec
from harness.device_memory import (
    filled_region,
    open_device_arena,
)
from harness.fake_devices import FakeDevice

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
        feed.leave(feed.fed_bytes)


async def filled(arena: DeviceArena, pool: DeviceCopyPool, seed: int) -> Region:
    return await filled_region(arena, pool, noise(MIB, seed))


async def test_copies_are_in_host_memory_and_come_in_turn(
    arena: DeviceArena, pool: DeviceCopyPool
) -> None:
    hoist, copies = Hoisting(pool, HostCopies()).hoist, list[HostCopy]()
    regions = [await filled(arena, pool, seed) for seed in (1, 2)]
    await asyncio.gather(*(hoist(r, SPEC, copies.append, refuse) for r in regions))
    first, second = (tensor_over(whole(copy), SPEC) for copy in copies)
    assert is_same(first, noise(MIB, 1)) and is_same(second, noise(MIB, 2))
    arena.free(regions)


async def test_what_fails_is_told(
    caplog: pytest.LogCaptureFixture, arena: DeviceArena, pool: DeviceCopyPool
) -> None:
    region, errors = await filled(arena, pool, 1), list[Exception]()
    arena.free([region])
    copies = HostCopies()
    await Hoisting(pool, copies).hoist(region, SPEC, refuse, errors.append)
    assert "released" in str(errors[0]) and "cannot be read" in caplog.text
    await until(lambda: not copies.used_bytes)
    caplog.clear()
    errors.clear()


async def test_a_cancelled_copy_tells_nobody(
    arena: DeviceArena, pool: DeviceCopyPool
) -> None:
    copies = HostCopies()
    hoisting, region = Hoisting(pool, copies), await filled(arena, pool, 1)
    coroutines = [hoisting.hoist(region, SPEC, refuse, refuse) for _ in range(2)]
    tasks = [asyncio.create_task(one) for one in coroutines]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    await until(lambda: not copies.used_bytes)  # though the tasks are kept
    arena.free([region])


async def test_a_copy_that_fails_on_its_gpu_is_kept_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gpu: FakeDevice,
    arena: DeviceArena,
    pool: DeviceCopyPool,
) -> None:
    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    copies, errors = HostCopies(), list[Exception]()
    region = await filled(arena, pool, 1)
    with monkeypatch.context() as patch:
        patch.setattr(gpu.process.cuda, "copy", fail)
        await Hoisting(pool, copies).hoist(region, SPEC, refuse, errors.append)
    await until(lambda: not copies.used_bytes)
    assert "off the bus" in str(errors[0]) and caplog.records
    caplog.clear()
    arena.free([region])


async def test_who_cannot_be_told_of_a_copy_is_told_of_that(
    caplog: pytest.LogCaptureFixture, arena: DeviceArena, pool: DeviceCopyPool
) -> None:
    def fail(told: object) -> None:
        raise MemoryError

    copies, errors = HostCopies(), list[Exception]()
    hoisting, region = Hoisting(pool, copies), await filled(arena, pool, 1)
    await hoisting.hoist(region, SPEC, fail, errors.append)
    await hoisting.digest(region, SPEC, fail, errors.append)
    assert [type(error) for error in errors] == [MemoryError] * 2
    caplog.clear()
    errors.clear()
    await until(lambda: not copies.used_bytes)
    arena.free([region])


async def test_each_copy_waits_until_others_are_gone(
    arena: DeviceArena, pool: DeviceCopyPool
) -> None:
    hoisting, copies = Hoisting(pool, HostCopies(MIB)), list[HostCopy]()
    regions = [await filled(arena, pool, seed) for seed in (1, 2)]
    hoist = hoisting.hoist
    tasks = [
        asyncio.create_task(hoist(region, SPEC, copies.append, refuse))
        for region in regions
    ]
    await until(lambda: bool(copies))
    await until_blocked(*tasks)
    assert len(copies) == 1
    copies.clear()
    await asyncio.wait(tasks)
    assert len(copies) == 1
    arena.free(regions)


async def test_a_digest_waits_for_no_copy_to_be_sent(
    arena: DeviceArena, pool: DeviceCopyPool
) -> None:
    hoisting, copies = Hoisting(pool, HostCopies(MIB)), list[HostCopy]()
    region, digests = await filled(arena, pool, 1), list[bytes]()
    await hoisting.hoist(region, SPEC, copies.append, refuse)
    waiting = asyncio.create_task(hoisting.hoist(region, SPEC, copies.append, refuse))
    await until_blocked(waiting)
    await hoisting.digest(region, SPEC, digests.append, refuse)
    assert len(digests) == len(copies) == 1
    copies.clear()
    await waiting
    arena.free([region])


async def test_what_cannot_be_digested_is_told(
    caplog: pytest.LogCaptureFixture, arena: DeviceArena, pool: DeviceCopyPool
) -> None:
    region, errors = await filled(arena, pool, 1), list[Exception]()
    arena.free([region])
    hoisting = Hoisting(pool, HostCopies())
    await hoisting.digest(region, SPEC, refuse, errors.append)
    assert "released" in str(errors[0]) and "cannot be digested" in caplog.text
    caplog.clear()


@pytest.mark.usefixtures("small_pieces")
async def test_a_long_part_is_fed_as_far_as_there_is_room(
    arena: DeviceArena, pool: DeviceCopyPool
) -> None:
    copies, fed = HostCopies(2 * PIECE), Fed()
    region = await filled(arena, pool, 1)
    assert isinstance(region, DeviceRegion)
    region.edges = b""
    hoisting = Hoisting(pool, copies, 1)
    task = asyncio.create_task(hoisting.hoist(region, SPEC, fed, refuse))
    while len(fed.content) < MIB:
        await until(lambda: fed.ahead >= min(2 * PIECE, MIB - len(fed.content)))
        await until_blocked(task)
        assert max(fed.ahead, copies.used_bytes) <= 2 * PIECE
        fed.take()
    await task
    assert fed.content == bytes(noise(MIB, 1).tolist())
    assert not region.edges  # those of a piece are not its own
    await until(lambda: not copies.used_bytes)
    arena.free([region])


@pytest.mark.usefixtures("small_pieces")
async def test_as_many_parts_are_fed_at_a_time_as_may_be(
    arena: DeviceArena, pool: DeviceCopyPool
) -> None:
    copies, fed = HostCopies(3 * PIECE), Fed()
    regions = [await filled(arena, pool, seed) for seed in (1, 2, 3)]
    hoisting = Hoisting(pool, copies, 2)
    coroutines = [hoisting.hoist(region, SPEC, fed, refuse) for region in regions]
    tasks = [asyncio.create_task(one) for one in coroutines]
    await until(lambda: sorted(x.fed_bytes for x in fed.feeds) == [PIECE, 2 * PIECE])
    await until_blocked(*tasks)
    assert len(fed.feeds) == 2
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    fed.feeds.clear()
    await until(lambda: not copies.used_bytes)  # though the tasks are kept
    arena.free(regions)


@pytest.mark.usefixtures("small_pieces")
async def test_what_fails_while_it_is_fed_is_told(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gpu: FakeDevice,
    arena: DeviceArena,
    pool: DeviceCopyPool,
) -> None:
    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    copies, fed, errors = HostCopies(2 * PIECE), Fed(), list[Exception]()
    region = await filled(arena, pool, 1)
    hoisting = Hoisting(pool, copies, 1).hoist(region, SPEC, fed, errors.append)
    task = asyncio.create_task(hoisting)
    await until(lambda: bool(fed.feeds) and fed.feeds[0].fed_bytes == 2 * PIECE)
    with monkeypatch.context() as patch:
        patch.setattr(gpu.process.cuda, "copy", fail)
        fed.take()
        await task
    assert "off the bus" in str(errors[0]) and "cannot be read" in caplog.text
    fed.feeds.clear()
    await until(lambda: not copies.used_bytes)
    caplog.clear()
    arena.free([region])


@pytest.mark.usefixtures("small_pieces")
async def test_what_is_in_host_memory_is_not_fed(pool: DeviceCopyPool) -> None:
    class OnHost:
        def place(self, spec: TensorSpec) -> torch.Tensor:
            return noise(spec.nbytes)

    with pytest.raises(TypeError, match="lies on a GPU"):
        await Hoisting(pool, HostCopies(), 1).copy(OnHost(), SPEC, refuse)
