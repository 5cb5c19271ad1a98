"""Tensors in an arena that somebody else made, or fills, than who stores them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from asynckv.tensors.arena import Arena, HeapArena, Region
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.on_gpu import KVOnGpu
from asynckv.tensors.paged_arena import PagedArena
from asynckv.tensors.slab_regions import SlabRegion
from asynckv.tensors.views import empty_tensor
from asynckv.types import TensorSpec

__all__ = ("Lending", "allocate_but")


class Lending:
    """Lends memory of ``arena``, and knows again what was lent.

    ``ordinary`` makes the tensors that are not there, on the host by default.
    """

    def __init__(
        self,
        arena: PagedArena | HeapArena,
        ordinary: Callable[[TensorSpec], torch.Tensor] | None = None,
    ) -> None:
        self._make_ordinary = ordinary
        self._slabs = arena if isinstance(arena, PagedArena) else None
        self._lent: weakref.WeakValueDictionary[int, SlabRegion] = (
            weakref.WeakValueDictionary()
        )
        """Regions of tensors that :meth:`empty` has returned, by their addresses."""

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor that is charged as long as it lives.

        An ordinary one where it is small, or there is no room for it now.
        """
        slabs = self._slabs
        if slabs is None or slabs.is_closed:
            return self._ordinary(spec)
        (region,) = slabs.allocate([spec.nbytes]) or (None,)
        tensor = None
        if isinstance(region, SlabRegion):
            tensor = _tensor_in(region, spec)
        if tensor is None or not isinstance(region, SlabRegion):
            slabs.free([] if region is None else [region])
            return self._ordinary(spec)
        self._lent[tensor.data_ptr()] = region
        region.is_lent = True
        region.release()
        return tensor

    def spare(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor for the application, charged to nobody.

        In memory that comes back, where enough of it lies idle, else an ordinary one.
        """
        region = None if self._slabs is None else self._slabs.take_spare(spec.nbytes)
        if region is None:
            return self._ordinary(spec)
        tensor = _tensor_in(region, spec)
        if tensor is None:
            region.release()
            return self._ordinary(spec)
        region.hand_out()
        region.release()
        return tensor

    def _ordinary(self, spec: TensorSpec) -> torch.Tensor:
        make = self._make_ordinary
        return empty_tensor(spec) if make is None else make(spec)

    def regions_of(
        self, tensors: Iterable[KVMemory | KVOnGpu]
    ) -> tuple[SlabRegion | None, ...]:
        """Return for each tensor from :meth:`empty` the region that is all of it.

        ``None`` for any other tensor, and for one whose region has an owner;
        nothing where there is none from :meth:`empty` at all.
        """
        return tuple(map(self._region_of, tensors)) if self._lent else ()

    def _region_of(self, tensor: KVMemory | KVOnGpu) -> SlabRegion | None:
        if isinstance(tensor, KVOnGpu):
            tensor = tensor.tensor
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return None
        region = self._lent.get(tensor.data_ptr())
        if region is None or not region.is_released or region.is_handed_out:
            return None
        is_whole = tensor.nbytes == region.nbytes and tensor.is_contiguous()
        is_plain = not (tensor.is_conj() or tensor.is_neg())
        return region if is_whole and is_plain else None


def _tensor_in(region: SlabRegion, spec: TensorSpec) -> torch.Tensor | None:
    """Return a tensor there; ``None`` if the process may have no more mappings."""
    try:
        return region.tensor(spec)
    except OSError:
        return None


def allocate_but(
    lent: Sequence[SlabRegion | None],
    arena: Arena,
    sizes: Sequence[int],
    charges: Sequence[int],
) -> list[Region] | None:
    """Take one region a size, all or none, but for those that are there already."""
    owned = {
        index: region
        for index, region in enumerate(lent)
        if region is not None and region.own()
    }
    others = [nbytes for index, nbytes in enumerate(sizes) if index not in owned]
    regions = arena.allocate(others, charges)
    if regions is None:
        arena.free(list(owned.values()))
        return None
    for index, region in owned.items():  # in rising order
        regions.insert(index, region)
    return regions
