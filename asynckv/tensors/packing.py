"""How the tensors of one entry share pages: sizes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asynckv.tensors.slabs import PAGE_NBYTES

__all__ = ("ALIGNMENT_NBYTES", "SHARED_PAGES_BELOW", "pack", "pages_of")

ALIGNMENT_NBYTES: Final = 64
"""Every tensor begins at a multiple of it."""

SHARED_PAGES_BELOW: Final = 64 * 1024
"""Smaller tensors of an entry share pages, which are free when the last has left."""

_PACKED_NBYTES: Final = 256 * 1024


def pack(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return blocks in pages, and for each size its block and the offset in that.

    Small tensors share blocks, aligned to 64 bytes; the others have one each.
    """
    blocks: list[int] = []
    places: list[tuple[int, int]] = []
    packed, filled = -1, 0
    for nbytes in sizes:
        if nbytes >= SHARED_PAGES_BELOW:
            places.append((len(blocks), 0))
            blocks.append(pages_of(nbytes))
            continue
        if packed < 0 or filled + nbytes > _PACKED_NBYTES:
            packed, filled = len(blocks), 0
            blocks.append(0)
        places.append((packed, filled))
        blocks[packed] = pages_of(filled + nbytes)
        filled += -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
    return blocks, places


def pages_of(nbytes: int) -> int:
    """Return how many pages so many bytes need."""
    return -(-nbytes // PAGE_NBYTES)
