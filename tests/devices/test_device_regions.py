from __future__ import annotations

import gc
import threading

import pytest
import torch

from asynckv.devices.arena import DeviceArena, HostRegion, place_of, region_behind
from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import GPUFailed
from asynckv.types import TensorSpec
from harness.device_memory import region_in
from harness.fake_devices import FakeDevice
from harness.fake_gpus.gates import Gate
from harness.fake_gpus.streams import Delay, FakeTorchEvent

MIB = 2**20
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


@pytest.mark.parametrize("when", ["marked", "asked"])
def test_memory_of_a_gpu_that_does_not_answer_stays_held(
    gpu: FakeDevice, arena: DeviceArena, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def refuse(*args: object) -> None:
        raise GPUFailed("the context is gone")

    region = region_in(arena, MIB)
    tensor = region.tensor(SPEC)
    arena.free([region])
    with monkeypatch.context() as patch:
        if when == "marked":
            patch.setattr(gpu.tensors, "mark", refuse)
        else:
            patch.setattr(FakeTorchEvent, "query", refuse)
        del tensor
        gc.collect()
        arena.collect()
        assert region.is_quiet == (when == "marked")  # which has no fence
        assert not arena.fits([4 * MIB])
