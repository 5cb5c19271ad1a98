"""Regions in shared memory that grows slab by slab."""

from __future__ import annotations

from collections.abc import Callable

from asynckv.tensors.arena import Pages
from asynckv.tensors.paged_arena import IdlePages, PagedArena
from asynckv.tensors.slab_pages import SlabPages
from asynckv.tensors.slab_regions import SlabRegion

__all__ = ("SlabArena",)


class SlabArena(PagedArena):
    """Regions in slabs that are allocated as they are needed, up to ``max_bytes``.

    ``wanted`` is called when a slab is needed: :meth:`SlabPages.make_slab`, in a
    thread, then :meth:`add_slab` are to follow.
    """

    pages: SlabPages

    def __init__(
        self,
        max_bytes: int,
        *,
        wanted: Callable[[], None],
        freed: Callable[[], None],
        pinned: Callable[[SlabRegion], None] = lambda region: None,
        unmapped: Callable[[IdlePages], None] = lambda idle: None,
    ) -> None:
        pages = SlabPages(max_bytes, wanted)
        super().__init__(
            max_bytes, pages, freed=freed, pinned=pinned, unmapped=unmapped
        )

    def _region(
        self, nbytes: int, pages: Pages, offset: int, generation: int
    ) -> SlabRegion:
        return SlabRegion(nbytes, self.pins, pages, offset, generation)
