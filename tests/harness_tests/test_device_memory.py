from __future__ import annotations

import pytest

from asynckv.testing.expectations import is_same, noise
from asynckv.types import TensorSpec
from harness.device_memory import (
    filled_region,
    open_device_arena,
    open_device_pool,
    region_in,
)
from harness.fake_devices import FakeDevice

MIB = 2**20


async def test_a_region_that_is_filled_has_these_bytes_on_the_gpu(
    gpu: FakeDevice,
) -> None:
    with open_device_arena(gpu) as arena, open_device_pool(gpu) as pool:
        region = await filled_region(arena, pool, noise(MIB, 3))
        tensor = region.tensor(TensorSpec((MIB,), "uint8"))
        assert tensor.is_cuda and is_same(tensor, noise(MIB, 3))
        del tensor
        arena.free([region])


@pytest.mark.parametrize("nbytes", [64, MIB + 1], ids=["little", "much"])
def test_what_the_gpu_does_not_have_is_no_region_of_it(
    gpu: FakeDevice, nbytes: int
) -> None:
    with open_device_arena(gpu, MIB) as arena, pytest.raises(LookupError):
        region_in(arena, nbytes)


def test_leaving_leaves_nothing_on_the_gpu(gpu: FakeDevice) -> None:
    with open_device_arena(gpu, MIB):
        assert gpu.process.owned
    assert not gpu.process.owned
