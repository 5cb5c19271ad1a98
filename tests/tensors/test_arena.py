from __future__ import annotations

import pytest
import torch

from asynckv.errors import EntryTooLarge
from asynckv.tensors.arena import HeapArena, heap_memory
from asynckv.tensors.views import bytes_of, tensor_over
from asynckv.types import TensorSpec

MIB = 2**20


def test_takes_all_regions_or_none() -> None:
    arena = HeapArena(10)
    assert arena.allocate([6, 5]) is None
    assert arena.used_bytes == 0
    regions = arena.allocate([6, 4])
    assert regions is not None
    assert [region.nbytes for region in regions] == [6, 4]
    assert (arena.used_bytes, arena.peak_bytes) == (10, 10)


def test_a_region_is_given_back_once() -> None:
    arena = HeapArena(10)
    (region,) = arena.allocate([10]) or []
    for _ in range(2):
        region.release()
    assert arena.used_bytes == 0
    assert arena.peak_bytes == 10


def test_memory_lives_as_long_as_its_tensor() -> None:
    arena = HeapArena(16)
    (region,) = arena.allocate([8]) or []
    tensor = region.tensor(TensorSpec((2,), "float32"))
    tensor.copy_(torch.tensor([1.0, 2.0]))
    region.release()
    del region
    assert tensor.tolist() == [1.0, 2.0]


def test_a_view_and_a_tensor_are_the_same_bytes() -> None:
    (region,) = HeapArena(8).allocate([8]) or []
    region.view()[:] = bytes(range(8))
    assert region.tensor(TensorSpec((8,), "uint8")).tolist() == list(range(8))


def test_what_is_outside_is_charged_when_it_is_adopted() -> None:
    arena = HeapArena(10)
    regions = arena.allocate_outside([8])
    assert arena.used_bytes == 0
    (other,) = arena.allocate([3]) or []
    assert not arena.adopt(regions)
    other.release()
    assert arena.adopt(regions)
    assert arena.used_bytes == 8
    regions[0].release()
    assert arena.used_bytes == 0


def test_says_what_could_ever_fit() -> None:
    arena = HeapArena(10)
    arena.allocate([10])
    assert not arena.fits([1])
    assert arena.could_ever_fit([10])
    assert not arena.could_ever_fit([10, 1])


@pytest.mark.parametrize("nbytes", [4097, 16 * 1024, 64 * 1024, MIB + 1])
def test_memory_of_the_heap_begins_at_a_multiple_of_64(nbytes: int) -> None:
    kept = [heap_memory(nbytes) for _ in range(8)]
    tensors = [tensor_over(x, TensorSpec((nbytes,), "uint8")) for x in kept]
    assert {tensor.data_ptr() % 64 for tensor in tensors} == {0}
    assert {memory.nbytes for memory in kept} == {nbytes}
    assert not any(memory.readonly for memory in kept)


def test_empty_tensors_take_no_room() -> None:
    arena = HeapArena(0)
    (region,) = arena.allocate([0]) or []
    assert region.tensor(TensorSpec((0, 3), "int16")).shape == (0, 3)


def test_regions_of_any_size_hold_tensors_of_any_dtype() -> None:
    arena = HeapArena(2**20)
    for count in (1, 256, 4096):
        (region,) = arena.allocate([16 * count]) or []
        tensor = region.tensor(TensorSpec((count,), "complex128"))
        tensor.fill_(1j)
        assert bytes(region.view()) == bytes_of(tensor)


def test_many_regions_are_freed_at_once_and_only_once() -> None:
    arena = HeapArena(10)
    regions = arena.allocate([6, 4]) or []
    regions[0].release()
    arena.free(regions)
    arena.free(regions)
    assert arena.used_bytes == 0


def test_a_region_that_is_held_is_given_back_when_the_last_hold_ends() -> None:
    arena = HeapArena(10)
    (region,) = arena.allocate([10]) or []
    holds = [region.hold(), region.hold()]
    region.release()
    assert not arena.fits([1])
    for _ in range(2):
        holds[0].release()
    assert arena.used_bytes == 10
    holds[1].release()
    assert arena.used_bytes == 0


def test_a_hold_that_ends_before_the_release_keeps_nothing() -> None:
    arena = HeapArena(10)
    (region,) = arena.allocate([10]) or []
    region.hold().release()
    assert arena.used_bytes == 10
    region.release()
    assert arena.used_bytes == 0


def test_an_arena_of_the_heap_has_all_its_room_from_the_start() -> None:
    assert not HeapArena(10).is_growing


def test_memory_that_the_process_cannot_have_is_an_entry_too_large() -> None:
    arena = HeapArena(2**49)
    (region,) = arena.allocate([2**48]) or []
    with pytest.raises(EntryTooLarge, match=f"no memory for {2**48} bytes"):
        region.view()
