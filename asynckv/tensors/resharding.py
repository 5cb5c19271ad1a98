"""A resharding plan done to tensors: regions of one rank into regions of another.

What a plan says is checked against the tensors before a byte moves: a copy that does
not fit is refused, it never reaches beyond a block.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Final

import numpy

from asynckv.parallel.copies import CopySide, Span, StridedCopy
from asynckv.tensors.blocks import KVBlocks, KVMemory
from asynckv.tensors.jobs import CopyJob, Pace, run_jobs
from asynckv.tensors.segments import Places, SegmentView, alignment_of

__all__ = ("reshard", "reshard_jobs")

_PIECE_NBYTES: Final = 2**20

_JOBS: Final = 4
"""A copy between many regions is as many jobs, so that threads can share it."""


def reshard(
    copies: Iterable[StridedCopy],
    sources: Sequence[KVMemory],
    targets: Sequence[KVMemory],
    span: Span,
) -> None:
    """Copy what one read of a plan says, in the calling thread.

    ``sources`` and ``targets`` are the two ranks' regions, in their order, and share
    no memory; the first dimension of each counts the blocks of ``span``, whatever the
    dtype and the other dimensions are. :func:`reshard_jobs` is for a ``CopyPool``.

    :raises ValueError: the regions are not what the plan is for, or have too few
        blocks, or a target has a block twice
    """
    run_jobs(reshard_jobs(copies, sources, targets, span))


def reshard_jobs(
    copies: Iterable[StridedCopy],
    sources: Sequence[KVMemory],
    targets: Sequence[KVMemory],
    span: Span,
) -> list[CopyJob]:
    """Return the copies as jobs for a ``CopyPool``; see :func:`reshard`.

    Of many layers they take milliseconds to be made: on an event loop let the pool do
    that too, by ``await pool.make_and_run(lambda: reshard_jobs(...))``.

    :raises ValueError: as for :func:`reshard`, except that a block which is there
        twice is found when a job comes to it
    """
    jobs: list[CopyJob] = []
    pace = Pace()
    for copy in copies:
        segments = copy.segments_of(span)
        starts = span.source_start, span.target_start
        sides = (copy.source, sources, "source"), (copy.target, targets, "target")
        for (side, regions, name), start in zip(sides, starts, strict=True):
            needed = _block_of(copy, side, segments.stop - 1, start) + 1
            _check(copy, side, regions, needed if segments else 0, name=name, pace=pace)
        jobs += (
            _ReshardJob(copy, sources, targets, span, turn)
            for turn in range(min(copy.region_pairs, _JOBS))
        )
    return jobs


def _check(
    copy: StridedCopy,
    side: CopySide,
    regions: Sequence[KVMemory],
    needed: int,
    *,
    name: str,
    pace: Pace,
) -> None:
    steps = list(zip(copy.counts, side.steps, strict=True))
    last = side.offset + (side.segments - 1) * side.segment_nbytes + copy.nbytes
    last += sum((count - 1) * step.nbytes for count, step in steps)
    numbers = [side.region]
    for count, step in steps:
        if step.regions:
            numbers = [
                number + index * step.regions
                for number in numbers
                for index in range(count)
            ]
    for number in numbers:
        pace.keep()
        if not 0 <= number < len(regions):
            raise ValueError(f"the plan has a {name} region {number} of {len(regions)}")
        region = regions[number]
        if needed > len(region):
            raise ValueError(
                f"{name} region {number} has {len(region)} blocks, "
                f"the span takes {needed}"
            )
        if len(region) and last * len(region) > region.nbytes:
            raise ValueError(
                f"a block of {name} region {number} has {region.nbytes // len(region)} "
                f"bytes, the plan reaches to {last}"
            )


class _ReshardJob(CopyJob):
    """One copy, between some of its pairs of regions."""

    def __init__(
        self,
        copy: StridedCopy,
        sources: Sequence[KVMemory],
        targets: Sequence[KVMemory],
        span: Span,
        turn: int,
    ) -> None:
        self._copy, self._span, self._turn = copy, span, turn
        self._sources, self._targets = sources, targets
        self._segments = copy.segments_of(span)

    @property
    def nbytes(self) -> int:
        pairs = self._copy.region_pairs
        whole = len(self._segments) * self._copy.segment_nbytes
        return whole // pairs * len(range(self._turn, pairs, _JOBS))

    def steps(self) -> Generator[None, None, None]:
        if not self._segments:
            return
        places = (
            self._places(self._copy.source, self._span.source_start),
            self._places(self._copy.target, self._span.target_start),
        )
        for copy in self._copy.between_regions(self._turn, _JOBS):
            yield from self._move(copy, *places)

    def _move(
        self, copy: StridedCopy, sources: Places, targets: Places
    ) -> Iterator[None]:
        origin = _as_blocks(self._sources[copy.source.region])
        landing = _as_blocks(self._targets[copy.target.region])
        if landing.overlaps:
            raise ValueError("a block is there twice: what should land in it?")
        unit = math.gcd(
            alignment_of(origin, copy.source),
            alignment_of(landing, copy.target),
            copy.nbytes,
        )
        source = SegmentView(origin, copy.source, copy.counts, copy.nbytes, unit)
        target = SegmentView(landing, copy.target, copy.counts, copy.nbytes, unit)
        piece = max(1, _PIECE_NBYTES // copy.segment_nbytes)
        for first in range(0, len(self._segments), piece):
            part = slice(first, first + piece)
            values = source.take((sources[0][part], sources[1][part]))
            target.put((targets[0][part], targets[1][part]), values)
            yield

    def _places(self, side: CopySide, start: int) -> Places:
        first = self._segments.start - start // self._copy.segment_tokens
        numbers = numpy.arange(first, first + len(self._segments), dtype=numpy.int64)
        blocks, within = numpy.divmod(numbers, side.segments)
        return blocks, within


def _block_of(copy: StridedCopy, side: CopySide, segment: int, start: int) -> int:
    return (segment - start // copy.segment_tokens) // side.segments


def _as_blocks(memory: KVMemory) -> KVBlocks:
    if isinstance(memory, KVBlocks):
        return memory
    return KVBlocks(memory, range(len(memory)))
