"""Where the bytes of a head lie in a rank's regions: strides, by layout and shape."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from asynckv.parallel.shapes import EngineShape

__all__ = ("PartPlaces", "Step", "places_of", "region_block_nbytes", "region_count")


class Step(NamedTuple):
    """How far it is to the next of an axis: in regions, or in bytes of a block."""

    regions: int = 0
    nbytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PartPlaces:
    """Where the keys, or the values, of one rank lie.

    The first head of the first token of a block of the first layer is in ``region``,
    at ``offset`` of the block; ``steps`` lead from there along L, N and H. ``nbytes``
    are those of one head, ``block_nbytes`` those of a block of such a region.
    """

    region: int
    offset: int
    nbytes: int
    block_nbytes: int
    steps: Mapping[str, Step]


def places_of(shape: EngineShape, layers: int) -> tuple[PartPlaces, ...]:
    """Return where keys and values lie at a rank of so many layers, or latents."""
    return tuple(
        _places_of(shape, layers, part) for part in range(len(shape.part_nbytes))
    )


def region_count(shape: EngineShape, layers: int) -> int:
    """Return how many regions a rank of so many layers has."""
    sizes = _sizes(shape, layers)
    return math.prod(sizes[axis] for axis in shape.layout.outer)


def region_block_nbytes(shape: EngineShape, layers: int) -> tuple[int, ...]:
    """Return the bytes that a block has in each region of a rank of so many layers."""
    keys, *values = places_of(shape, layers)
    is_apart = shape.layout.split_k_and_v
    step = values[0].region if is_apart else 1
    return tuple(
        values[0].block_nbytes if is_apart and index // step % 2 else keys.block_nbytes
        for index in range(region_count(shape, layers))
    )


def _places_of(shape: EngineShape, layers: int, part: int) -> PartPlaces:
    sizes = _sizes(shape, layers)
    rows = [shape.layout.row_nbytes(nbytes) for nbytes in shape.part_nbytes]
    steps: dict[str, Step] = {}
    region = offset = 0
    for axis in reversed(shape.layout.inner):
        if axis == "K":  # the values come after the keys, whatever the size of each
            offset = part * rows[0]
            rows = [sum(rows)] * 2
        else:
            steps[axis] = Step(nbytes=rows[part])
            rows = [nbytes * sizes[axis] for nbytes in rows]
    unit = 1
    for axis in reversed(shape.layout.outer):
        if axis == "K":
            region = part * unit
        else:
            steps[axis] = Step(regions=unit)
        unit *= sizes[axis]
    return PartPlaces(region, offset, shape.part_nbytes[part], rows[part], steps)


def _sizes(shape: EngineShape, layers: int) -> dict[str, int]:
    heads = shape.heads_per_rank
    return {"L": layers, "K": 2, "N": shape.block_size, "H": heads}
