"""Strided copies: which bytes of which blocks go where, in as few words as it takes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from asynckv.parallel.places import Step

__all__ = ("CopySide", "Move", "Place", "Span", "StridedCopy")


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
