from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from asynckv.devices.access import GpuAccess, gpu_access
from asynckv.devices.arena import (
    MARK_NBYTES,
    DeviceAllocation,
    DeviceArena,
    DevicePages,
    DeviceRegion,
    HostRegion,
    place_of,
    region_behind,
)
from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.imports import import_allocation, open_allocation
from asynckv.devices.names import Device
from asynckv.devices.tensors import Gpus
from asynckv.errors import GPUFailed, GPUUnavailable
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.types import TensorSpec
from harness.device_memory import region_in
from harness.fake_devices import FakeDevice, fake_device_of
from harness.fake_gpus import FakeGpus
from harness.fake_gpus.gates import Gate
from harness.fake_gpus.streams import Delay, FakeTorchEvent

MIB = 2**20


def test_large_regions_are_on_the_gpu_and_small_ones_on_the_host(
    arena: DeviceArena,
) -> None:
    large, small = arena.allocate([MIB]), arena.allocate([64])
    assert large is not None and isinstance(large[0], DeviceRegion)
    assert small is not None and isinstance(small[0], HostRegion)
    arena.free([*large, *small])
    assert not arena.used_bytes


def test_the_bound_is_kept(arena: DeviceArena) -> None:
    held = arena.allocate([4 * MIB])
    assert held is not None and arena.allocate([MIB]) is None
    arena.free(held)
    assert arena.fits([4 * MIB]) and not arena.could_ever_fit([4 * MIB + 1])


def test_what_is_outside_of_it_is_on_the_host(arena: DeviceArena) -> None:
    outside = arena.allocate_outside([MIB])
    assert [type(region) for region in outside] == [HostRegion]
    assert not arena.used_bytes


def test_a_closed_arena_lets_its_memory_go_with_the_last_region(
    gpu: FakeDevice,
) -> None:
    dropped = list[object]()
    arena = DeviceArena(
        *(4 * MIB, gpu.device),
        wanted=lambda: None,
        freed=lambda: None,
        unmapped=dropped.append,
    )
    arena.add_slab(arena.pages.make_slab())
    regions = arena.allocate([MIB])
    arena.close()
    assert regions is not None and not dropped
    arena.free(regions)
    assert len(dropped) == 1 and not arena.pages.is_open


def pages_on(device: Device, max_bytes: int = 4 * MIB) -> DevicePages:
    return DevicePages(max_bytes, device, lambda: None)


@contextlib.contextmanager
def waiting_for(quiet: GpuAccess, call: Callable[[], object]) -> Iterator[None]:
    """Call it in a thread beside an operation, which ends behind the block."""
    quiet.begin_operation()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(0.02)
    yield
    quiet.end_operation()
    thread.join(30)


def limit(gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch, max_nbytes: int) -> None:
    """Let the GPU have no more memory than that."""
    cuda = gpu.process.cuda
    malloc = cuda.malloc

    def refuse(nbytes: int) -> DeviceMemory:
        if nbytes > max_nbytes:
            raise GPUFailed("out of memory", code=2)
        return malloc(nbytes)

    monkeypatch.setattr(cuda, "malloc", refuse)


def test_all_of_it_is_allocated_at_once_beside_a_mark(gpu: FakeDevice) -> None:
    pages = pages_on(gpu.device)
    assert pages.add_slab(pages.make_slab()) and pages.free_bytes == 4 * MIB
    allocation = pages.allocation
    mark = bytes(gpu.process.cuda.view(allocation.mark))
    assert len(mark) == MARK_NBYTES and mark.startswith(allocation.nonce)


def test_nothing_is_allocated_or_freed_while_an_operation_waits_for_a_peer(
    gpu: FakeDevice,
) -> None:
    quiet, pages = gpu_access(gpu.process.cuda, gpu.index), pages_on(gpu.device)
    with waiting_for(quiet, pages.make_slab):
        assert not pages.is_open
    assert pages.is_open
    idle = pages.unmap()
    assert idle is not None
    with waiting_for(quiet, idle.drop):
        assert gpu.process.owned
    assert not gpu.process.owned


def test_where_the_whole_cannot_be_had_a_half_is_taken(
    gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(gpu, monkeypatch, 3 * MIB)
    pages = pages_on(gpu.device)
    assert not pages.add_slab(pages.make_slab())
    assert pages.nbytes == 2 * MIB and not pages.could_ever_fit([3 * MIB])


@pytest.mark.parametrize("max_nbytes", [0, MIB // 2])
def test_where_there_is_too_little_the_error_is_kept(
    gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch, max_nbytes: int
) -> None:
    limit(gpu, monkeypatch, max_nbytes)
    pages = pages_on(gpu.device)
    assert pages.make_slab() is None and not pages.is_open
    assert isinstance(pages.error, GPUFailed)
    assert not pages.add_slab(None) and not pages.is_usable


def test_a_gpu_that_is_not_there_is_named(gpu: FakeDevice) -> None:
    pages = pages_on(Device(9, gpu.device.open))
    assert pages.make_slab() is None
    assert isinstance(pages.error, GPUUnavailable) and "cuda:9" in str(pages.error)


def test_a_gpu_that_cannot_be_opened_says_why_whatever_it_is() -> None:
    def fail() -> Gpus:
        raise ValueError("numpy.dtype size changed")

    pages = pages_on(Device(0, fail))
    assert pages.make_slab() is None
    assert isinstance(pages.error, GPUFailed) and "dtype size" in str(pages.error)


def test_dropped_memory_goes_with_its_last_view(gpu: FakeDevice) -> None:
    pages = pages_on(gpu.device)
    pages.add_slab(pages.make_slab())
    view, idle = pages.allocation, pages.unmap()
    assert idle is not None and pages.unmap() is None
    idle.drop()
    assert gpu.process.owned
    del view
    assert not gpu.process.owned


def test_there_is_memory_once_it_is_allocated_and_no_more_than_that(
    gpu: FakeDevice,
) -> None:
    pages = pages_on(gpu.device)
    assert pages.is_growing
    with pytest.raises(RuntimeError, match="yet"):
        _ = pages.allocation
    pages.add_slab(pages.make_slab())
    assert not pages.is_growing
    assert pages.take([4 * MIB + 1]) is None
    (place,) = pages.take([4 * MIB]) or []
    pages.free(place[0])
    assert pages.free_bytes == 4 * MIB


def test_closed_pages_want_nothing(gpu: FakeDevice) -> None:
    wanted: list[str] = []
    pages = DevicePages(MIB, gpu.device, lambda: wanted.append("memory"))
    pages.want()
    pages.close()
    pages.want()
    assert wanted == ["memory"]


SPEC = TensorSpec((MIB,), "uint8")


def test_its_tensor_is_on_the_gpu_and_its_place_is_the_same_memory(
    arena: DeviceArena,
) -> None:
    region = region_in(arena, MIB)
    tensor, place = region.tensor(SPEC), place_of(region, SPEC)
    tensor.as_subclass(torch.Tensor).fill_(7)
    assert isinstance(place, DeviceMemory) and region_behind(place) is region
    view = arena.pages.allocation.gpus
    assert tensor.is_cuda and view.tensors.memory_of(tensor).address == place.address
    arena.free([region])


def test_the_host_has_no_view_of_it(arena: DeviceArena) -> None:
    region = region_in(arena, MIB)
    for view in (region.view, region.memory):
        with pytest.raises(TypeError, match="GPU"):
            view()
    arena.free([region])


def test_its_memory_is_nobody_elses_before_the_gpu_has_left_its_views(
    gpu: FakeDevice, arena: DeviceArena
) -> None:
    region = region_in(arena, MIB)
    tensor = region.tensor(SPEC)
    arena.free([region])
    gpu.tensors.stream(0).add(Delay(3))
    del tensor
    gc.collect()
    assert not region.is_quiet and arena.pinned_bytes == MIB
    while not region.is_quiet:
        assert not arena.fits([4 * MIB])
    arena.collect()
    assert arena.fits([4 * MIB])


def test_of_many_views_that_the_gpu_is_at_work_with_few_are_asked_for_at_once(
    gpu: FakeDevice, arena: DeviceArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(event: FakeTorchEvent) -> bool:
        asked.append(event)
        return query(event)

    query, asked = FakeTorchEvent.query, list[FakeTorchEvent]()
    monkeypatch.setattr(FakeTorchEvent, "query", counted)
    busy, done, spec = Gate(), gpu.tensors.new_stream(0), TensorSpec((8192,), "uint8")
    regions = arena.take_spares([8192] * 100) or []
    views = [region.tensor(spec) for region in regions[:99]]
    gpu.tensors.stream(0).add(busy)
    views.clear()
    with gpu.tensors.use_stream(done):  # which is not at work with the last one
        regions[99].tensor(spec)
    assert arena.fits([MIB]) and len(asked) <= 16
    for _ in range(7):
        arena.collect()
    assert [region.has_views for region in regions] == [True] * 99 + [False]
    busy.open()
    arena.collect()
    arena.collect()
    assert not arena.is_waiting
    arena.free(regions)


def test_of_many_views_that_are_gone_some_give_their_memory_back_at_once(
    arena: DeviceArena,
) -> None:
    regions, spec = arena.take_spares([8192] * 200) or [], TensorSpec((8192,), "uint8")
    views = [region.tensor(spec) for region in regions]
    arena.free(regions)
    views.clear()
    arena.collect()
    left = sum(region.has_views for region in regions)
    assert 100 < left < 200 and arena.is_waiting
    while arena.is_waiting:
        arena.collect()
    assert not any(region.has_views for region in regions)


def test_a_released_region_is_lent_no_more(arena: DeviceArena) -> None:
    region = region_in(arena, MIB)
    arena.free([region])
    with pytest.raises(RuntimeError, match="released"):
        region.tensor(SPEC)


def test_what_is_owned_anew_has_no_edges_of_its_former_content(
    arena: DeviceArena,
) -> None:
    region = region_in(arena, MIB)
    region.edges = b"former"
    assert not region.own() and region.edges == b"former"
    tensor = region.tensor(SPEC)
    region.release()
    assert region.own() and not region.edges
    del tensor
    arena.free([region])


def test_memory_of_the_host_never_changes_hands() -> None:
    assert not HostRegion(8, None).can_change_hands()


def test_a_view_is_also_fenced_by_the_stream_it_was_handed_out_on(
    gpu: FakeDevice, arena: DeviceArena
) -> None:
    side, region = gpu.tensors.new_stream(0), region_in(arena, MIB)
    with gpu.tensors.use_stream(side):
        tensor = region.tensor(SPEC)
    arena.free([region])
    gate = Gate()
    side.add(gate)
    del tensor
    gc.collect()
    assert not region.is_quiet
    gate.open()
    assert region.is_quiet


def test_a_view_that_another_thread_drops_is_fenced_on_its_own_stream(
    gpu: FakeDevice, arena: DeviceArena
) -> None:
    region = region_in(arena, MIB)
    views, gate = [region.tensor(SPEC)], Gate()
    gpu.tensors.stream(0).add(gate)
    arena.free([region])

    def drop() -> None:
        with gpu.tensors.use_stream(gpu.tensors.new_stream(0)):
            views.clear()

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()
    gc.collect()
    assert not region.is_quiet
    gate.open()
    assert region.is_quiet


def test_a_view_is_fenced_by_the_stream_of_whoever_drops_it(
    gpu: FakeDevice, arena: DeviceArena
) -> None:
    region, side, gate = region_in(arena, MIB), gpu.tensors.new_stream(0), Gate()
    views = [region.tensor(SPEC)]
    arena.free([region])
    side.add(gate)
    with gpu.tensors.use_stream(side):
        views.clear()
        gc.collect()
    assert not region.is_quiet
    gate.open()
    assert region.is_quiet


def test_what_asynckv_itself_is_at_needs_no_fence(
    gpu: FakeDevice, arena: DeviceArena
) -> None:
    region, gate = region_in(arena, MIB), Gate()
    place = place_of(region, SPEC)
    arena.free([region])
    gpu.tensors.stream(0).add(gate)  # of whoever computes, and knows nothing of it
    assert not arena.fits([4 * MIB])
    del place
    assert region.is_quiet
    arena.collect()
    assert arena.fits([4 * MIB])
    gate.open()


@pytest.mark.parametrize("when", ["marked", "asked", "forked"])
def test_memory_of_a_gpu_that_does_not_answer_stays_held(
    gpu: FakeDevice, arena: DeviceArena, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def refuse(*args: object) -> None:
        raise GPUFailed("the context is gone")

    def refuse_in_child(device: int) -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    region, told = region_in(arena, MIB), list[object]()
    tensor = region.tensor(SPEC)
    arena.free([region])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "unraisablehook", told.append)
        if when == "marked":
            patch.setattr(gpu.tensors, "mark", refuse)
        elif when == "asked":
            patch.setattr(FakeTorchEvent, "query", refuse)
        else:
            patch.setattr(gpu.tensors, "stream_of", refuse_in_child)
        del tensor
        gc.collect()
        arena.collect()
        assert region.is_quiet == (when != "asked")  # the others have no fence
        assert not arena.fits([4 * MIB]) and not told


NBYTES = 4096


@pytest.fixture
def theirs(gpus: FakeGpus) -> FakeDevice:
    return fake_device_of(gpus.process())


def show(gpus: FakeGpus) -> DeviceAllocation:
    """Return memory of another process. No fixture: it has to go before the GPUs do."""
    opened = fake_device_of(gpus.process()).device.opened()
    return DeviceAllocation(opened, opened.cuda.malloc(NBYTES))


def test_what_is_open_holds_what_its_owner_wrote(
    gpus: FakeGpus, theirs: FakeDevice
) -> None:
    shown = show(gpus)
    found = import_allocation(theirs.process.cuda, 0, shown.handle, NBYTES)
    assert found.nonce() == shown.nonce and found.nbytes == shown.nbytes
    found.release()


def test_it_is_open_once_and_closed_with_the_last_user(
    gpus: FakeGpus, theirs: FakeDevice
) -> None:
    shown = show(gpus)
    cuda = theirs.process.cuda
    first = import_allocation(cuda, 0, shown.handle, NBYTES)
    second = import_allocation(cuda, 0, shown.handle, NBYTES)
    assert first is second and len(cuda._opened) == 1
    first.release()
    assert len(cuda._opened) == 1
    second.release()
    assert not cuda._opened


def test_another_size_is_refused(gpus: FakeGpus, theirs: FakeDevice) -> None:
    shown = show(gpus)
    first = import_allocation(theirs.process.cuda, 0, shown.handle, NBYTES)
    with pytest.raises(GPUFailed, match="8192"):
        import_allocation(theirs.process.cuda, 0, shown.handle, 8192)
    first.release()
    assert not theirs.process.cuda._opened


@pytest.mark.parametrize("nbytes", [0, MARK_NBYTES])
def test_what_has_no_room_is_not_opened(
    gpus: FakeGpus, theirs: FakeDevice, nbytes: int
) -> None:
    shown = show(gpus)
    with pytest.raises(GPUFailed, match="no room"):
        import_allocation(theirs.process.cuda, 0, shown.handle, nbytes)
    assert not theirs.process.cuda._opened


async def test_it_is_opened_off_the_loop_and_has_not_ended(
    gpus: FakeGpus, theirs: FakeDevice
) -> None:
    shown, ends = show(gpus), list[None]()
    cuda = theirs.process.cuda
    found, nonce = await open_allocation(
        cuda, 0, shown.handle, NBYTES, lambda: ends.append(None)
    )
    assert nonce == shown.nonce and not ends
    found.release()


async def test_what_cannot_be_opened_has_ended(
    gpus: FakeGpus, theirs: FakeDevice
) -> None:
    shown, ends = show(gpus), list[None]()
    cuda = theirs.process.cuda
    with pytest.raises(GPUFailed, match="no room"):
        await open_allocation(cuda, 0, shown.handle, 0, lambda: ends.append(None))
    assert len(ends) == 1


async def test_a_call_that_is_cancelled_as_its_opening_fails_is_cancelled(
    gpus: FakeGpus, theirs: FakeDevice
) -> None:
    shown, counts = show(gpus), list[bool]()

    async def fail() -> None:
        with pytest.raises(GPUFailed, match="no room"):
            await open_allocation(theirs.process.cuda, 0, shown.handle, 0, lambda: None)

    async def check(k: int, how: CancelMode, outcome: Outcome[None]) -> None:
        counts.append(outcome.cancelled)

    await sweep_cancellation(fail, check, modes=("completion",))
    assert counts == [True, False]


def test_each_gpu_of_a_process_opens_what_it_can_reach(two_gpus: FakeGpus) -> None:
    shown, cuda = show(two_gpus), two_gpus.process().cuda
    with pytest.raises(GPUFailed, match="cannot reach"):
        import_allocation(cuda, 1, shown.handle, NBYTES)
    two_gpus.has_peer_access = True
    every = [import_allocation(cuda, gpu, shown.handle, NBYTES) for gpu in (0, 1)]
    assert [one.memory.device for one in every] == [0, 1] and len(cuda._opened) == 2
    assert every[1].nonce() == shown.nonce
    for one in every:
        one.release()
    assert not cuda._opened
