"""Regions of an arena, as tiers see them."""

from __future__ import annotations

from asynckv.abc import TierMemory
from asynckv.tensors.arena import Region
from asynckv.tensors.runs import pieces_of

__all__ = ("tier_memory",)


def tier_memory(region: Region) -> TierMemory:
    """Return where the bytes of ``region`` lie, in order; also as pages if it has any.

    A region of 64 KiB or more in the slabs of an arena has pages of its own.
    """
    pages = region.page_memory()
    if pages is None:
        pieces = pieces_of(region.memory(), 0, region.nbytes)
        return TierMemory(region.nbytes, pieces)
    return TierMemory(
        region.nbytes,
        pieces_of(pages, 0, region.nbytes),
        pieces_of(pages, 0, pages.nbytes),
    )
