from __future__ import annotations

import errno
import gc
from collections.abc import Iterator

import pytest
import torch

from asynckv.devices.growth import Lending, allocate_but
from asynckv.tensors import slabs as slabs_module
from asynckv.tensors.arena import HeapArena
from asynckv.tensors.paged_arena import SlabArena
from asynckv.tensors.slab_regions import SlabRegion
from asynckv.tensors.slabs import has_slabs
from asynckv.types import TensorSpec

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")

_MIB = 2**20
_LARGE = TensorSpec((_MIB,), "uint8")


@pytest.fixture
def arena() -> Iterator[SlabArena]:
    arena = SlabArena(16 * _MIB, wanted=lambda: None, freed=lambda: None)
    arena.add_slab(arena.pages.make_slab())
    yield arena
    arena.close()
    gc.collect()


@pytest.fixture
def lending(arena: SlabArena) -> Lending:
    return Lending(arena)


def _region(lending: Lending, tensor: torch.Tensor) -> SlabRegion | None:
    (region,) = lending.regions_of([tensor]) or (None,)
    return region


def test_a_lent_tensor_is_charged_as_long_as_it_lives(
    arena: SlabArena, lending: Lending
) -> None:
    tensor = lending.empty(_LARGE)
    assert arena.pinned_bytes == _MIB
    del tensor
    arena.collect()
    assert arena.pinned_bytes == arena.used_bytes == 0


def test_a_lent_tensor_is_known_again(arena: SlabArena, lending: Lending) -> None:
    ordinary = torch.empty(_MIB, dtype=torch.uint8)
    assert lending.regions_of([ordinary]) == ()
    tensor = lending.empty(_LARGE)
    assert _region(lending, tensor) is not None
    for other in (tensor[1:], tensor.view(torch.int32)[::2], ordinary):
        assert _region(lending, other) is None
    del tensor, other
    arena.collect()
    assert lending.regions_of([ordinary]) == ()


def test_an_owner_keeps_a_lent_tensors_memory(
    arena: SlabArena, lending: Lending
) -> None:
    tensor = lending.empty(_LARGE)
    tensor[5] = 6
    region = _region(lending, tensor)
    assert region is not None
    assert region.own()
    assert not region.own()
    assert _region(lending, tensor) is None
    assert arena.pinned_bytes == 0
    del tensor
    arena.collect()
    assert region.view()[5] == 6
    region.release()
    assert arena.used_bytes == 0


def test_what_is_small_or_has_no_room_is_ordinary_and_not_charged(
    arena: SlabArena, lending: Lending
) -> None:
    for nbytes in (0, 16, 17 * _MIB):
        tensor = lending.empty(TensorSpec((nbytes,), "uint8"))
        assert tensor.nbytes == nbytes
        assert arena.pinned_bytes == arena.used_bytes == 0


def test_what_has_no_place_is_ordinary_and_not_charged(
    arena: SlabArena, lending: Lending
) -> None:
    spare = lending.spare(TensorSpec((16 * _MIB,), "uint8"))
    assert lending.empty(_LARGE).nbytes == _MIB
    assert arena.pinned_bytes == arena.used_bytes == 0
    del spare


def test_spare_tensors_are_charged_to_nobody_and_come_back(
    arena: SlabArena, lending: Lending
) -> None:
    first = lending.spare(_LARGE)
    address = first.data_ptr()
    assert (arena.used_bytes, arena.pinned_bytes) == (0, 0)
    assert arena.handed_out_bytes == _MIB
    assert _region(lending, first) is None
    second = lending.spare(_LARGE)
    assert second.data_ptr() != address
    del first
    assert lending.spare(_LARGE).data_ptr() == address


def test_without_idle_memory_a_spare_tensor_is_ordinary(arena: SlabArena) -> None:
    lending = Lending(arena)
    for nbytes in (16, 17 * _MIB):
        assert lending.spare(TensorSpec((nbytes,), "uint8")).nbytes == nbytes
    assert arena.handed_out_bytes == 0


def test_where_no_more_can_be_mapped_tensors_are_ordinary(
    arena: SlabArena, lending: Lending, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, runs: object, *, writable: bool) -> None:
        raise OSError(errno.ENOMEM, "too many mappings")

    monkeypatch.setattr(slabs_module, "stitch", refuse)
    others = [lending.empty(_LARGE) for _ in range(16)]
    others.sort(key=torch.Tensor.data_ptr)
    del others[::2]
    for lend in (lending.empty, lending.spare):
        assert lend(TensorSpec((3 * _MIB,), "uint8")).nbytes == 3 * _MIB
        arena.collect()
        assert (arena.used_bytes, arena.pinned_bytes) == (0, 8 * _MIB)
        assert arena.handed_out_bytes == 0
        assert arena.pages.free_bytes == 8 * _MIB


def test_a_heap_lends_ordinary_tensors() -> None:
    arena = HeapArena(8 * _MIB)
    lending = Lending(arena)
    for tensor in (lending.empty(_LARGE), lending.spare(_LARGE)):
        assert tensor.nbytes == _MIB
        assert _region(lending, tensor) is None
    assert arena.used_bytes == arena.handed_out_bytes == 0


def test_what_is_there_already_is_not_taken_twice(
    arena: SlabArena, lending: Lending
) -> None:
    tensor = lending.empty(TensorSpec((10 * _MIB,), "uint8"))
    lent = lending.regions_of([tensor])
    sizes = [_MIB, 10 * _MIB, 2 * _MIB]
    assert allocate_but((None, *lent, None), arena, [7 * _MIB, *sizes[1:]], []) is None
    assert (arena.used_bytes, arena.pinned_bytes) == (0, 10 * _MIB)
    regions = allocate_but((None, *lent, None), arena, sizes, [5]) or []
    assert [region.nbytes for region in regions] == [*sizes, 5]
    assert regions[1] is lent[0]
    assert (arena.used_bytes, arena.pinned_bytes) == (13 * _MIB + 5, 0)
    arena.free(regions)
