from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from asynckv.buffers.stage import Stage
from asynckv.buffers.staging import Original, Staging
from asynckv.errors import ChecksumError, GPUFailed
from asynckv.protocol.digests import digest_of
from asynckv.tensors.arena import Region
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.device_regions import DeviceRegion
from asynckv.tensors.slab_regions import SlabRegion
from asynckv.tensors.slabs import has_slabs
from asynckv.tensors.views import bytes_of
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.device_memory import (
    filled_region,
    open_device_arena,
)
from asynckv.testing.expectations import is_same
from asynckv.testing.fake_devices import FakeDevice
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.types import TensorSpec

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")

SPEC = TensorSpec((MIB,), "uint8")


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage(4 * MIB)
    yield stage
    stage.close()
    await stage.aclose()


@pytest.fixture
async def region(gpu: FakeDevice, pool: DeviceCopyPool) -> AsyncIterator[Region]:
    with open_device_arena(gpu) as arena:
        region = await filled_region(arena, pool, noise(MIB, 1))
        yield region
        region.release()


def original(region: Region, *, digest: bytes | None = None) -> Original:
    return Original(region, SPEC, digest or digest_of(bytes_of(noise(MIB, 1))))


def refuse(told: object) -> None:
    raise AssertionError(told)


class Told:
    """What was told, once each time."""

    def __init__(self) -> None:
        self.copies: list[Sequence[SlabRegion] | None] = []
        self.errors: list[Exception] = []

    def release(self) -> None:
        for copies in self.copies:
            for copy in copies or ():
                copy.release()


async def test_a_copy_is_whole_in_memory_that_can_be_shared(
    pool: DeviceCopyPool, stage: Stage, region: Region
) -> None:
    told = Told()
    await Staging(pool, stage, "edges").copy(
        [original(region)], told.copies.append, refuse
    )
    ((copy,),) = [copies or () for copies in told.copies]
    assert is_same(copy.tensor(SPEC), noise(MIB, 1)) and not copy.is_on_device
    told.release()
    assert not stage.used_bytes


async def test_where_there_is_no_room_nothing_is_copied(
    pool: DeviceCopyPool, stage: Stage, region: Region
) -> None:
    told, held = Told(), await stage.take([4 * MIB])
    staging = Staging(pool, stage, "edges")
    await staging.copy([original(region)], told.copies.append, refuse)
    assert told.copies == [None]
    for one in held or ():
        one.release()


async def test_without_a_stage_nothing_is_copied(
    pool: DeviceCopyPool, region: Region
) -> None:
    told = Told()
    staging = Staging(pool, None, "edges")
    await staging.copy([original(region)], told.copies.append, refuse)
    assert told.copies == [None]


@pytest.mark.parametrize("digest", ["full", "edges"])
async def test_bytes_that_are_not_those_inserted_are_shown_to_nobody(
    digest: str,
    caplog: pytest.LogCaptureFixture,
    gpu: FakeDevice,
    pool: DeviceCopyPool,
    stage: Stage,
    region: Region,
) -> None:
    place = region.place(SPEC)
    assert isinstance(place, DeviceMemory)
    gpu.process.cuda.view(place)[0] ^= 1
    del place
    assert isinstance(region, DeviceRegion)
    told, edges = Told(), region.edges
    staging = Staging(pool, stage, "full" if digest == "full" else "edges")
    await staging.copy([original(region)], refuse, told.errors.append)
    assert isinstance(told.errors[0], ChecksumError) and not stage.used_bytes
    assert edges and region.edges == edges  # who reads it on the GPU notices too
    assert "cannot be read from its GPU" in caplog.text
    caplog.clear()


async def test_without_digests_nothing_is_compared(
    pool: DeviceCopyPool, stage: Stage, region: Region
) -> None:
    told = Told()
    one = original(region, digest=b"another")
    await Staging(pool, stage, "off").copy([one], told.copies.append, refuse)
    told.release()
    assert len(told.copies) == 1 and not stage.used_bytes


async def test_what_has_no_digest_is_not_compared(
    pool: DeviceCopyPool, stage: Stage, region: Region
) -> None:
    told = Told()
    one = Original(region, SPEC, None)
    await Staging(pool, stage, "full").copy([one], told.copies.append, refuse)
    told.release()
    assert len(told.copies) == 1 and not stage.used_bytes


async def test_what_the_gpu_refuses_is_told_and_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gpu: FakeDevice,
    pool: DeviceCopyPool,
    stage: Stage,
    region: Region,
) -> None:
    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    told = Told()
    with monkeypatch.context() as patch:
        patch.setattr(gpu.process.cuda, "copy", fail)
        await Staging(pool, stage, "full").copy(
            [original(region)], refuse, told.errors.append
        )
    assert "off the bus" in str(told.errors[0]) and not stage.used_bytes
    assert region.can_change_hands()  # though the log has kept the error
    caplog.clear()


async def test_copies_that_cannot_be_told_of_are_released_and_that_is_told(
    caplog: pytest.LogCaptureFixture,
    pool: DeviceCopyPool,
    stage: Stage,
    region: Region,
) -> None:
    told = Told()
    staging = Staging(pool, stage, "full")
    await staging.copy([original(region)], refuse, told.errors.append)
    assert isinstance(told.errors[0], AssertionError) and not stage.used_bytes
    caplog.clear()


async def test_copies_of_one_peer_come_in_turn(
    pool: DeviceCopyPool, stage: Stage, region: Region
) -> None:
    staging, told = Staging(pool, stage, "full"), Told()
    async with staging._turn:
        copying = staging.copy([original(region)], told.copies.append, refuse)
        task = asyncio.create_task(copying)
        await until_blocked(task)
        assert not stage.used_bytes
    await task
    told.release()
    assert len(told.copies) == 1


async def test_a_cancelled_copy_tells_nobody_and_keeps_nothing(
    pool: DeviceCopyPool, stage: Stage, region: Region
) -> None:
    staging, told = Staging(pool, stage, "full"), Told()

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        assert len(told.copies) == (not outcome.cancelled)
        told.release()
        told.copies.clear()
        assert not stage.used_bytes
        assert region.can_change_hands()

    await sweep_cancellation(
        lambda: staging.copy([original(region)], told.copies.append, refuse),
        check,
        before=lambda: until(lambda: not stage.used_bytes),
        modes=("task", "scope", "again", "completion"),
    )
