from __future__ import annotations

import numpy
import pytest
import torch

from asynckv.parallel.copies import CopySide, Step
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.resharding import Places, SegmentView, alignment_of

# Blocks of 8 bytes: two segments, each two pieces of one byte.
_SIDE = CopySide(0, 1, 2, 4, (Step(0, 2),))


def _places(*places: tuple[int, int]) -> Places:
    blocks, within = zip(*places, strict=True)
    return numpy.array(blocks), numpy.array(within)


def test_segments_are_the_bytes_that_strides_lead_to() -> None:
    pool = torch.arange(32, dtype=torch.uint8).view(4, 8)
    view = SegmentView(KVBlocks(pool, [3, 1]), _SIDE, (2,), 1, 1)
    taken = view.take(_places((0, 0), (0, 1), (1, 1)))
    assert taken.flatten().tolist() == [25, 27, 29, 31, 13, 15]
    view.put(_places((1, 0)), torch.zeros((1, 2, 1), dtype=torch.uint8))
    assert pool[1].tolist() == [8, 0, 10, 0, 12, 13, 14, 15]


def test_neighbours_are_taken_as_they_lie() -> None:
    pool = torch.arange(8).view(4, 2)
    side = CopySide(0, 8, 1, 16, ())
    view = SegmentView(KVBlocks(pool, [0, 2, 3]), side, (), 8, 8)
    taken = view.take(_places((1, 0), (2, 0)))
    assert taken.flatten().tolist() == [5, 7]
    assert taken.data_ptr() == pool[2, 1].data_ptr()
    view.put(_places((1, 0), (2, 0)), torch.zeros((2, 1), dtype=torch.int64))
    assert pool.tolist() == [[0, 1], [2, 3], [4, 0], [6, 0]]


@pytest.mark.parametrize(
    ("pool", "side", "nbytes"),
    [
        (torch.zeros(4, 16), CopySide(0, 0, 1, 64, ()), 8),
        (torch.zeros(4, 17), CopySide(0, 0, 1, 68, ()), 4),
        (torch.zeros(4, 32)[:, 1:17], CopySide(0, 0, 1, 64, ()), 4),
        (torch.zeros(4, 16), CopySide(0, 6, 1, 64, ()), 2),
        (torch.zeros(4, 16), CopySide(0, 0, 1, 64, (Step(0, 3),)), 1),
    ],
)
def test_units_are_as_large_as_all_places_allow(
    pool: torch.Tensor, side: CopySide, nbytes: int
) -> None:
    assert alignment_of(KVBlocks(pool, [0]), side) == nbytes
