"""Regions in the memory of a GPU, beside small ones on the heap of the host.

What is as small as to ride with its frame on every path stays where frames are made; it
is a tensor of the GPU for whoever takes it, all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from asynckv.tensors.arena import Pages, Region
from asynckv.tensors.device_pages import DevicePages
from asynckv.tensors.device_regions import DeviceRegion, HostRegion
from asynckv.tensors.devices import Device
from asynckv.tensors.paged_arena import IdlePages, PagedArena
from asynckv.tensors.slab_regions import SlabRegion

__all__ = ("DeviceArena",)

_LEAST_SPARE_NBYTES: Final = 1


class DeviceArena(PagedArena):
    """Regions in one allocation of up to ``max_bytes`` of ``device``.

    ``wanted`` is called when it is needed first: :meth:`DevicePages.make_slab`, in a
    thread, then :meth:`add_slab` are to follow. ``freed`` is called too while the GPU
    has to be asked again whether it is done with memory.
    """

    pages: DevicePages
    least_spare_nbytes = _LEAST_SPARE_NBYTES

    def __init__(
        self,
        max_bytes: int,
        device: Device,
        *,
        wanted: Callable[[], None],
        freed: Callable[[], None],
        pinned: Callable[[SlabRegion], None] = lambda region: None,
        unmapped: Callable[[IdlePages], None] = lambda idle: None,
        given_back: Callable[[], None] = lambda: None,
    ) -> None:
        pages = DevicePages(max_bytes, device, wanted)
        super().__init__(
            *(max_bytes, pages),
            freed=freed,
            pinned=pinned,
            unmapped=unmapped,
            given_back=given_back,
        )

    def allocate_outside(
        self, sizes: Sequence[int], charges: Sequence[int] = ()
    ) -> list[Region]:
        return [HostRegion(nbytes, None) for nbytes in (*sizes, *charges)]

    def _region(
        self, nbytes: int, pages: Pages, offset: int, generation: int
    ) -> DeviceRegion:
        return DeviceRegion(
            *(nbytes, self.pins, pages, offset, generation),
            device_pages=self.pages,
        )

    def _on_heap(self, nbytes: int) -> Region:
        return HostRegion(nbytes, self)
