"""What lands in a bounce buffer, and is copied to a GPU from there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from asynckv.devices.arena import place_of
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import ChecksumError, GPUFailed
from asynckv.protocol.wire import digest_of
from asynckv.tensors.arena import Region
from asynckv.tensors.runs import fill
from asynckv.tensors.views import bytes_of, empty_tensor
from asynckv.testing.expectations import noise
from asynckv.transfers.targets import (
    DeviceTarget,
    HostTarget,
    Part,
    Target,
    TensorTarget,
    check_targets,
    copy_to_device,
    device_memory,
    fill_targets,
    match_targets,
    target_in,
)
from asynckv.types import TensorSpec
from harness.device_memory import (
    open_device_arena,
    region_in,
)
from harness.fake_devices import FakeDevice


def test_targets_are_checked_before_anything_is_waited_for() -> None:
    assert check_targets(None) == {}
    with pytest.raises(ValueError, match="no tensor's name"):
        check_targets({"keys": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"into\['key'\]: .* not contiguous"):
        check_targets({"key": torch.zeros(4, 4).T})


def test_targets_must_fit_the_entry() -> None:
    specs = {"key": TensorSpec((2,), "float32")}
    match_targets(specs, {"key": torch.zeros(2)})
    for name, tensor in (("hidden", torch.zeros(2)), ("key", torch.zeros(3))):
        with pytest.raises(ValueError, match=name):
            match_targets(specs, {name: tensor})


NBYTES = 2**17
SPEC = TensorSpec((NBYTES,), "uint8")
BYTES = bytes_of(noise(NBYTES, 1))
DIGEST = digest_of(BYTES)


@pytest.fixture
def part(gpu: FakeDevice) -> Iterator[Part]:
    with open_device_arena(gpu, 2**20) as arena:
        region = region_in(arena, NBYTES)
        yield Part("key", SPEC, region)
        arena.free([region])


def target_of(part: Part, pool: CopyPool) -> DeviceTarget:
    assert part.region is not None
    target = target_in(part.region, part, pool)
    assert isinstance(target, DeviceTarget)
    return target


async def digest_there(part: Part, pool: CopyPool) -> bytes:
    assert part.region is not None
    (digest,) = await pool.digest([place_of(part.region, SPEC)])
    return digest


async def test_what_is_for_the_host_lands_where_it_belongs(pool: CopyPool) -> None:
    region = Region(NBYTES, None)
    target = target_in(region, Part("key", SPEC, region), pool)
    await fill_targets([target], [BYTES], [b"of other bytes"])
    assert not target.is_on_device and region.view() == BYTES
    with pytest.raises(TypeError, match="is on no GPU"):
        target.device()


@pytest.mark.parametrize("digest", [DIGEST, b""])
async def test_what_is_for_a_gpu_lands_on_its_way_there(
    pool: CopyPool, part: Part, digest: bytes
) -> None:
    little = memoryview(bytearray(3))
    targets: list[Target] = [target_of(part, pool), HostTarget(little)]
    await fill_targets(targets, [BYTES, memoryview(b"abc")], [digest, b""])
    assert await digest_there(part, pool) == DIGEST
    assert bytes(little) == b"abc"
    assert targets[0].device().nbytes == NBYTES


async def test_what_changed_on_its_way_is_refused(pool: CopyPool, part: Part) -> None:
    target = target_of(part, pool)
    with pytest.raises(ChecksumError, match="on its way to the GPU"):
        await fill_targets([target], [memoryview(bytes(NBYTES))], [DIGEST])


async def test_what_is_not_digested_once_more_is_copied_as_it_is(
    pool: CopyPool, part: Part
) -> None:
    target = target_of(part, pool)
    target.is_digested = False
    fill(target.host(), BYTES)
    await copy_to_device([target], [b"of other bytes"])
    assert await digest_there(part, pool) == DIGEST and not target.is_in_host


async def test_what_has_left_is_not_copied(pool: CopyPool, part: Part) -> None:
    target, region = target_of(part, pool), part.region
    fill(target.host(), BYTES)
    part.region = None
    await copy_to_device([target], [DIGEST])
    with pytest.raises(TypeError, match="lies elsewhere"):
        target.device()
    part.region = region
    assert await digest_there(part, pool) != DIGEST


async def test_what_a_gpu_may_write_to_for_ever_is_not_used_again(
    pool: CopyPool, part: Part
) -> None:
    with pytest.raises(GPUFailed, match="stuck"):
        target_of(part, pool).give_up(GPUFailed("it is stuck"))


def test_what_is_in_host_memory_is_on_no_gpu() -> None:
    with pytest.raises(TypeError, match="lies elsewhere"):
        device_memory(Region(NBYTES, None), SPEC)


async def test_a_tensor_is_made_when_it_is_copied_to(
    pool: CopyPool, gpu: FakeDevice
) -> None:
    target = TensorTarget(SPEC, None, pool, empty=empty_tensor)
    assert target.host() is not None and target.is_in_host
    fill(target.host(), BYTES)
    await copy_to_device([target], [b"of other bytes"])
    made = target.place()
    assert isinstance(made, torch.Tensor) and made.is_cuda
    assert await pool.digest([made]) == [DIGEST]
    target.give_up(GPUFailed("it is stuck"))
    assert target.place() is not made


async def test_a_callers_tensor_that_a_gpu_may_write_to_for_ever_is_not_used_again(
    pool: CopyPool, gpu: FakeDevice
) -> None:
    into = gpu.tensor(noise(NBYTES, 1))
    target = TensorTarget(SPEC, into, pool, empty=empty_tensor)
    assert target.place() is into
    with pytest.raises(GPUFailed, match="stuck"):
        target.give_up(GPUFailed("it is stuck"))


def test_a_tensor_is_written_by_another_gpu_once_it_is_ready(pool: CopyPool) -> None:
    target, memory = (
        TensorTarget(SPEC, None, pool, empty=empty_tensor),
        DeviceMemory(4096, NBYTES, 0),
    )
    with pytest.raises(TypeError, match="not ready"):
        target.device()
    target.ready(memory)
    assert target.device() is memory
