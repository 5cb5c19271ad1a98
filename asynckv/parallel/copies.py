"""Strided copies: which bytes of which blocks go where, in as few words as it takes.

Where a head lies in a rank's regions is said by strides; those of two sides become one
copy in the fewest, longest pieces.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from asynckv.parallel.shapes import EngineShape

__all__ = (
    "CopySide",
    "Held",
    "Move",
    "PartPlaces",
    "Place",
    "Span",
    "Step",
    "StridedCopy",
    "copies_between",
    "places_of",
    "region_block_nbytes",
    "region_count",
)


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


class Place(NamedTuple):
    """A byte of a block; blocks are counted along a request, not by their ids."""

    region: int
    block: int
    offset: int


class Move(NamedTuple):
    """So many bytes go from one place to another; both lie within one block."""

    source: Place
    target: Place
    nbytes: int


class Span(NamedTuple):
    """The first ``tokens`` tokens of a request, and what each side's blocks hold of it.

    The first of the source's blocks begins with token ``source_start``, the first of
    the target's with ``target_start``: both are multiples of the side's block size.
    What the target has from before is thus left alone.
    """

    tokens: int
    source_start: int = 0
    target_start: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class CopySide:
    """One end of a :class:`StridedCopy`.

    A block has ``segments`` segments, each ``segment_nbytes`` after the one before.
    The first bytes are in ``region`` at ``offset`` of a segment; ``steps`` lead to the
    others.
    """

    region: int
    offset: int
    segments: int
    segment_nbytes: int
    steps: tuple[Step, ...]

    def moved(self, ahead: Iterable[tuple[int, int]], kept: Sequence[int]) -> CopySide:
        """Return the side after so many of some steps, with the ``kept`` ones left."""
        region, offset = self.region, self.offset
        for index, count in ahead:
            region += count * self.steps[index].regions
            offset += count * self.steps[index].nbytes
        steps = tuple(self.steps[index] for index in kept)
        return dataclasses.replace(self, region=region, offset=offset, steps=steps)


@dataclasses.dataclass(frozen=True, slots=True)
class StridedCopy:
    """The same few strides for each segment of a request.

    A segment is ``segment_tokens`` tokens, the most that never cross a block of either
    side. For each segment, ``nbytes`` at a time move from the source to the target:
    once for each element of the product of ``counts``, outermost first, where
    the n-th element of a count is n of that side's steps away from its first.
    """

    segment_tokens: int
    nbytes: int
    counts: tuple[int, ...]
    source: CopySide
    target: CopySide

    @property
    def segment_nbytes(self) -> int:
        """Bytes that move for each segment."""
        return self.nbytes * math.prod(self.counts)

    def segments_of(self, span: Span) -> range:
        """Return the segments that lie in blocks of both sides.

        Blocks count whole, also where the last tokens of one are not there yet.

        :raises ValueError: a start is not the beginning of a block
        """
        size, ends = self.segment_tokens, []
        for side, start in self._starts(span):
            block = side.segments * size
            if start % block or start < 0:
                raise ValueError(f"token {start} begins no block of {block} tokens")
            ends.append(-(-span.tokens // block) * side.segments)
        first = max(span.source_start, span.target_start) // size
        return range(first, min(ends))

    def moves(self, span: Span) -> Iterator[Move]:
        """Yield each contiguous piece, segment by segment."""
        pieces = list(self._pieces())
        for segment in self.segments_of(span):
            (source_block, source_base), (target_block, target_base) = (
                self._at(side, start, segment) for side, start in self._starts(span)
            )
            for source, target in pieces:
                yield Move(
                    Place(source.regions, source_block, source_base + source.nbytes),
                    Place(target.regions, target_block, target_base + target.nbytes),
                    self.nbytes,
                )

    @property
    def region_pairs(self) -> int:
        """How many pairs of regions it goes between."""
        return math.prod(self.counts[index] for index in self._far())

    def between_regions(self, first: int = 0, step: int = 1) -> Iterator[StridedCopy]:
        """Yield it as a copy for each pair of regions, with loops that stay in blocks.

        Every ``step``-th pair from ``first`` on, for those who share the work.
        """
        far = self._far()
        near = [index for index in range(len(self.counts)) if index not in far]
        every = itertools.product(*(range(self.counts[index]) for index in far))
        for indices in itertools.islice(every, first, None, step):
            yield dataclasses.replace(
                self,
                counts=tuple(self.counts[index] for index in near),
                source=self.source.moved(zip(far, indices, strict=True), near),
                target=self.target.moved(zip(far, indices, strict=True), near),
            )

    def _far(self) -> list[int]:
        """Return which loops lead from one region to another, at either side."""
        steps = zip(self.source.steps, self.target.steps, strict=True)
        return [
            index
            for index, (ours, theirs) in enumerate(steps)
            if ours.regions or theirs.regions
        ]

    def _starts(self, span: Span) -> tuple[tuple[CopySide, int], tuple[CopySide, int]]:
        return (self.source, span.source_start), (self.target, span.target_start)

    def _at(self, side: CopySide, start: int, segment: int) -> tuple[int, int]:
        """Return block and offset of a segment, counted from the request's start."""
        block, within = divmod(segment - start // self.segment_tokens, side.segments)
        return block, within * side.segment_nbytes

    def _pieces(self) -> Iterator[tuple[Step, Step]]:
        for indices in itertools.product(*map(range, self.counts)):
            ahead = list(enumerate(indices))
            sides = self.source.moved(ahead, ()), self.target.moved(ahead, ())
            yield (
                Step(sides[0].region, sides[0].offset),
                Step(sides[1].region, sides[1].offset),
            )


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
