from __future__ import annotations

from collections.abc import Iterator

import pytest

from asynckv.errors import ChecksumError
from asynckv.protocol.digests import digest_of
from asynckv.tensors.arena import Region
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.views import bytes_of
from asynckv.testing.expectations import noise
from asynckv.transfers.incoming import PartLanding, lift_landed, on_gpu
from asynckv.types import TensorSpec
from harness.device_memory import (
    open_device_arena,
    region_in,
)
from harness.fake_devices import FakeDevice

NBYTES = 2**17
SPEC = TensorSpec((NBYTES,), "uint8")
BYTES = bytes_of(noise(NBYTES, 1))
DIGEST = digest_of(BYTES)


@pytest.fixture
def region(gpu: FakeDevice) -> Iterator[Region]:
    with open_device_arena(gpu, 2**20) as arena:
        region = region_in(arena, NBYTES)
        yield region
        arena.free([region])


async def test_what_is_for_the_host_lands_where_it_belongs(pool: CopyPool) -> None:
    region = Region(NBYTES, None)
    landing = PartLanding(region, SPEC, pool)
    landing.fill(BYTES)
    await lift_landed([landing], [b"of other bytes"], pool)
    assert not landing.is_to_be_lifted and region.view() == BYTES


@pytest.mark.parametrize("digest", [DIGEST, b""])
async def test_what_is_for_a_gpu_lands_on_its_way_there(
    pool: CopyPool, region: Region, digest: bytes
) -> None:
    landing = PartLanding(region, SPEC, pool)
    landing.fill(BYTES)
    assert landing.is_to_be_lifted
    await lift_landed(
        [landing, PartLanding(Region(1, None), SPEC, pool)], [digest, b""], pool
    )
    assert await pool.digest([region.place(SPEC)]) == [DIGEST]


async def test_what_changed_on_its_way_is_refused(
    pool: CopyPool, region: Region
) -> None:
    landing = PartLanding(region, SPEC, pool)
    landing.fill(memoryview(bytes(NBYTES)))
    with pytest.raises(ChecksumError, match="on its way to the GPU"):
        await lift_landed([landing], [DIGEST], pool)


async def test_what_is_in_host_memory_is_on_no_gpu() -> None:
    with pytest.raises(TypeError, match="lies elsewhere"):
        on_gpu(Region(NBYTES, None), SPEC)
