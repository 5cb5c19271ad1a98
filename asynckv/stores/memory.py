"""Regions of an arena, as tiers see them."""

from __future__ import annotations

from asynckv.abc import TierMemory
from asynckv.tensors.arena import Region
from asynckv.tensors.runs import pieces_of

__all__ = ("tier_memory",)


def tier_memory(region: Region) -> TierMemory:
    """Return where the bytes of ``region`` lie, in order."""
    return TierMemory(region.nbytes, pieces_of(region.memory(), 0, region.nbytes))
