"""Blocks seen as the segments of a strided copy, whatever their dtype is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy
import numpy.typing
import torch

from asynckv.parallel.copies import CopySide
from asynckv.tensors.blocks import KVBlocks

__all__ = ("Places", "SegmentView", "alignment_of")

_UNITS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

_Ids: TypeAlias = numpy.typing.NDArray[numpy.int64]

Places: TypeAlias = tuple[_Ids, _Ids]
"""Of each segment: the block that it is in, and which of that block's it is."""


def alignment_of(blocks: KVBlocks, side: CopySide) -> int:
    """Return how many bytes divide each place that the copy goes to: 8, 4, 2 or 1."""
    pool = blocks.pool
    size = pool.element_size()
    return math.gcd(
        8,
        pool.data_ptr(),
        pool.storage_offset() * size,
        pool.stride(0) * size,
        blocks.block_nbytes,
        side.offset,
        side.segment_nbytes,
        *(step.nbytes for step in side.steps),
    )


class SegmentView:
    """Segments of ``blocks``: each has ``counts`` pieces of ``nbytes`` bytes.

    ``unit`` divides all places; whoever makes one has checked that they lie within
    blocks.
    """

    def __init__(
        self,
        blocks: KVBlocks,
        side: CopySide,
        counts: Sequence[int],
        nbytes: int,
        unit: int,
    ) -> None:
        pool = blocks.pool.detach()
        row = blocks.block_nbytes // pool.element_size()
        rows = pool.as_strided((len(pool), row), (pool.stride(0), 1)).view(_UNITS[unit])
        steps = side.segment_nbytes, *(step.nbytes for step in side.steps)
        self._block_ids = blocks.block_ids
        self._view = rows.as_strided(
            (len(pool), side.segments, *counts, nbytes // unit),
            (rows.stride(0), *(step // unit for step in steps), 1),
            rows.storage_offset() + side.offset // unit,
        )

    def take(self, places: Places) -> torch.Tensor:
        """Return the segments' bytes: a view if their blocks follow each other."""
        ids, within = self._block_ids[places[0]], places[1]
        if (neighbours := self._neighbours(ids)) is not None:
            return self._view[neighbours, 0]
        return self._view[self._index(ids), self._index(within)]

    def put(self, places: Places, values: torch.Tensor) -> None:
        """Write the segments' bytes."""
        ids, within = self._block_ids[places[0]], places[1]
        if (neighbours := self._neighbours(ids)) is not None:
            self._view[neighbours, 0].copy_(values)
        else:
            moved = values.to(self._view.device)
            self._view[self._index(ids), self._index(within)] = moved

    def _neighbours(self, ids: _Ids) -> slice | None:
        if self._view.shape[1] != 1 or (numpy.diff(ids) != 1).any():
            return None
        return slice(int(ids[0]), int(ids[-1]) + 1)

    def _index(self, numbers: _Ids) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self._view.device)
