"""Two sides' strides as one copy in the fewest, longest pieces."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from asynckv.parallel.copies import CopySide, StridedCopy
from asynckv.parallel.places import PartPlaces, Step, places_of
from asynckv.parallel.shapes import EngineShape

__all__ = ("Held", "copies_between")


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds, and where in it some heads of some layers begin.

    ``shape`` is that of an engine which has no more than the rank: whose it was, of how
    many, is not said. ``first_layer`` and ``first_head`` are counted among its own.
    """

    shape: EngineShape
    first_layer: int
    first_head: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Loop:
    count: int
    source: Step
    target: Step


def copies_between(
    source: Held, target: Held, *, layers: int, heads: int
) -> tuple[StridedCopy, ...]:
    """Return how so many layers and heads get from one rank's regions to the other's.

    One copy does for keys and values where they are alike, else one each.
    """
    tokens = math.gcd(source.shape.block_size, target.shape.block_size)
    parts = [
        _copy_part(source, target, places, {"L": layers, "H": heads, "N": tokens})
        for places in zip(
            places_of(source.shape, source.shape.num_layers),
            places_of(target.shape, target.shape.num_layers),
            strict=True,
        )
    ]
    if len(parts) == 2 and (both := _as_one(*parts)) is not None:
        parts = [both]
    return tuple(_coalesced(copy) for copy in parts)


def _copy_part(
    source: Held,
    target: Held,
    places: tuple[PartPlaces, PartPlaces],
    counts: dict[str, int],
) -> StridedCopy:
    tokens = counts["N"]
    axes = [axis for axis in "LHN" if counts[axis] > 1]
    return StridedCopy(
        segment_tokens=tokens,
        nbytes=places[0].nbytes,
        counts=tuple(counts[axis] for axis in axes),
        source=_side(source, places[0], axes, tokens),
        target=_side(target, places[1], axes, tokens),
    )


def _side(held: Held, places: PartPlaces, axes: Sequence[str], tokens: int) -> CopySide:
    # MLA has no axis of heads, and one head.
    layer, head = places.steps["L"], places.steps.get("H", Step())
    return CopySide(
        region=places.region
        + held.first_layer * layer.regions
        + held.first_head * head.regions,
        offset=places.offset
        + held.first_layer * layer.nbytes
        + held.first_head * head.nbytes,
        segments=held.shape.block_size // tokens,
        segment_nbytes=tokens * places.steps["N"].nbytes,
        steps=tuple(places.steps[axis] for axis in axes),
    )


def _as_one(keys: StridedCopy, values: StridedCopy) -> StridedCopy | None:
    """Return both as one copy with a loop over the two, if their strides are equal."""
    sides = []
    for key, value in ((keys.source, values.source), (keys.target, values.target)):
        step = Step(value.region - key.region, value.offset - key.offset)
        moved = dataclasses.replace(value, region=key.region, offset=key.offset)
        if moved != key:
            return None
        sides.append(dataclasses.replace(key, steps=(step, *key.steps)))
    if keys.nbytes != values.nbytes:
        return None
    counts = (2, *keys.counts)
    return dataclasses.replace(keys, counts=counts, source=sides[0], target=sides[1])


def _coalesced(copy: StridedCopy) -> StridedCopy:
    """Return the same copy, regions outermost, with neighbours moved together."""
    loops = [
        _Loop(*loop)
        for loop in zip(copy.counts, copy.source.steps, copy.target.steps, strict=True)
    ]
    loops.sort(key=_outermost_first)
    nbytes, merged = copy.nbytes, list[_Loop]()
    for loop in reversed(loops):
        inner = merged[0] if merged else _Loop(nbytes, Step(0, 1), Step(0, 1))
        if not _continues(loop, inner):
            merged.insert(0, loop)
        elif merged:
            merged[0] = dataclasses.replace(inner, count=inner.count * loop.count)
        else:
            nbytes *= loop.count
    return dataclasses.replace(
        copy,
        nbytes=nbytes,
        counts=tuple(loop.count for loop in merged),
        source=_with_steps(copy.source, [loop.source for loop in merged]),
        target=_with_steps(copy.target, [loop.target for loop in merged]),
    )


def _outermost_first(loop: _Loop) -> tuple[int, ...]:
    target, source = loop.target, loop.source
    return -target.regions, -source.regions, -target.nbytes, -source.nbytes


def _continues(outer: _Loop, inner: _Loop) -> bool:
    """Whether the inner loop, run to its end, is where the outer one goes on."""
    return all(
        far == Step(near.regions * inner.count, near.nbytes * inner.count)
        for far, near in ((outer.source, inner.source), (outer.target, inner.target))
    )


def _with_steps(side: CopySide, steps: Sequence[Step]) -> CopySide:
    return dataclasses.replace(side, steps=tuple(steps))
