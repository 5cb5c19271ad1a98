"""Where what is sent is read, and where what comes lands: on a GPU, or in the host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
import torch

from asynckv.devices.arena import place_of
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.tensors import KVOnGpu
from asynckv.errors import ChecksumError, GPUFailed
from asynckv.protocol.wire import digest_of
from asynckv.tensors.arena import HeapArena, Region
from asynckv.tensors.blocks import KVBlocks, KVMemory, spec_in
from asynckv.tensors.runs import fill, joined
from asynckv.tensors.views import bytes_of, empty_tensor
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.source import (
    GpuSource,
    HostSource,
    copied_sources,
    dense,
    readable_in_place,
    release_staged,
    source_of,
    until_made,
)
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
from harness.fake_gpus.gates import Gate


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


def caught(gpu: FakeDevice, pool: CopyPool, nbytes: int = MIB) -> KVOnGpu:
    found = pool.catch(gpu.tensor(noise(nbytes)))
    assert isinstance(found, KVOnGpu)
    return found


async def test_what_is_long_is_read_where_it_is(
    gpu: FakeDevice, pool: CopyPool
) -> None:
    memory = caught(gpu, pool)
    source = await source_of(memory, pool, None, MIB)
    assert source.is_on_gpu and source.place() is memory and source.region is None
    assert (source.spec, source.nbytes) == (memory.spec, MIB)
    with pytest.raises(TypeError, match="no view"):
        source.host()


async def test_what_is_small_or_no_tensor_of_a_gpu_is_read_in_the_host(
    gpu: FakeDevice, pool: CopyPool
) -> None:
    small = caught(gpu, pool, 8)
    blocks = KVBlocks(noise(MIB).view(4, -1), [2, 1])
    for memory, nbytes in ((small, 8), (small, MIB), (blocks, MIB), (noise(8), MIB)):
        source = await source_of(memory, pool, None, nbytes)
        assert not source.is_on_gpu and source.region is None
        assert source.host().nbytes == source.nbytes == memory.nbytes
        assert source.spec == spec_in(memory)


async def test_the_callers_stream_is_waited_for(
    gpu: FakeDevice, pool: CopyPool
) -> None:
    gate = Gate()
    gpu.tensors.stream(0).add(gate)
    task = asyncio.create_task(
        until_made([HostSource(noise(8)), GpuSource(caught(gpu, pool))], pool)
    )
    await until(lambda: pool._threads > 0)
    await until_blocked(task)
    assert not task.done()
    gate.open()
    await task


async def test_of_the_host_nothing_is_waited_for(pool: CopyPool) -> None:
    await until_made([HostSource(torch.zeros(8))], pool)
    assert not pool._threads


async def test_a_gpu_that_fails_is_told_before_anything_is_asked(
    gpu: FakeDevice, pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    monkeypatch.setattr(gpu.process.cuda, "copy", fail)
    source = GpuSource(caught(gpu, pool))
    with pytest.raises(GPUFailed, match="off the bus"):
        await until_made([source], pool)
    assert source.spec == TensorSpec((MIB,), "uint8")


async def test_dense_copies_only_what_is_not_dense() -> None:
    pool = CopyPool()
    tensor = torch.arange(12).reshape(3, 4)
    assert (await dense(tensor, pool)).data_ptr() == tensor.data_ptr()
    turned = await dense(tensor.t(), pool)
    assert turned.is_contiguous() and torch.equal(turned, tensor.t())
    complex_ = torch.ones(2, dtype=torch.complex64) * 1j
    assert torch.equal(await dense(complex_.conj(), pool), complex_.conj())
    pool.close()


@pytest.mark.parametrize("read", [dense, readable_in_place])
async def test_what_is_on_a_gpu_is_read_from_a_copy_in_host_memory(
    gpu: FakeDevice,
    pool: CopyPool,
    read: Callable[[torch.Tensor, CopyPool], Awaitable[object]],
) -> None:
    source = torch.arange(3000).reshape(3, 1000)
    found = await read(gpu.tensor(source), pool)
    assert isinstance(found, torch.Tensor) and not found.is_cuda
    assert torch.equal(found, source)


def test_what_is_in_no_region_of_a_gpu_cannot_leave_from_there() -> None:
    (region,) = HeapArena(8).allocate([8]) or []
    for one in (None, region):
        with pytest.raises(TypeError, match="elsewhere"):
            device_memory(one, TensorSpec((8,), "uint8"))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float8_e4m3fn])
def test_few_plain_bytes_are_copied_where_they_are_looked_at(
    dtype: torch.dtype,
) -> None:
    tensor = torch.arange(8).to(dtype)[::2]
    is_now = bytes(bytes_of(tensor.contiguous()))
    sources = copied_sources({"key": tensor}, 32)
    assert sources is not None
    tensor.zero_()
    (source,) = sources.values()
    assert bytes(joined(source.host())) == is_now
    assert bytes(bytes_of(source.place())) == is_now  # type: ignore[arg-type]
    assert source.spec == spec_in(tensor)
    release_staged([source])
    assert bytes(joined(source.host())) == is_now


@pytest.mark.parametrize(
    "others",
    [
        {"value": torch.zeros(2, dtype=torch.uint8)},
        {"value": torch.nn.Parameter(torch.zeros(0))},
        {"value": KVBlocks(torch.zeros(2, 1), [0])},
    ],
)
def test_what_is_more_or_not_plain_is_not_copied(others: dict[str, KVMemory]) -> None:
    assert (
        copied_sources({"key": torch.zeros(3, dtype=torch.uint8), **others}, 4) is None
    )
