"""A resharding plan done to tensors: regions of one rank into regions of another.

What a plan says is checked against the tensors before a byte moves: a copy that does
not fit is refused, it never reaches beyond a block.

A receiver that cannot scatter lets the bytes land raw: the source's blocks, back to
back, in its own blocks. Afterwards they are put in its own block size and layout, where
they are: what vLLM does by ``kv_postprocess_*_on_receive``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import numpy
import numpy.typing
import torch

from asynckv.parallel.copies import CopySide, Span, StridedCopy
from asynckv.tensors.blocks import KVBlocks, KVMemory
from asynckv.tensors.jobs import CopyJob, Pace, run_jobs

__all__ = (
    "Places",
    "SegmentView",
    "alignment_of",
    "rearrange",
    "rearrange_jobs",
    "reshard",
    "reshard_jobs",
)


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
    return KVBlocks(memory, torch.arange(len(memory), device="cpu"))


def rearrange(copies: Sequence[StridedCopy], regions: Sequence[KVBlocks]) -> None:
    """Put blocks that hold the source's bytes in order into the target's layout.

    ``copies`` are of a plan between two shapes that have the same heads and layers a
    rank: :func:`~asynckv.parallel.plans.plan_rearrange` makes it. Each region's blocks
    are those that were received into, in the order in which they were. It takes about
    1 MiB of memory for a while. :func:`rearrange_jobs` is for a ``CopyPool``; when a
    run of that is cancelled, nothing that the blocks hold can be used.

    :raises ValueError: the plan moves bytes from one region to another, or the source's
        blocks do not fill a whole number of the target's; nothing was moved then
    """
    run_jobs(rearrange_jobs(copies, regions))


def rearrange_jobs(
    copies: Sequence[StridedCopy], regions: Sequence[KVBlocks]
) -> list[CopyJob]:
    """Return :func:`rearrange` as a job a region, for a ``CopyPool``.

    They take milliseconds to be made: on an event loop let the pool do that too, by
    ``await pool.make_and_run(lambda: rearrange_jobs(...))``.

    :raises ValueError: as that does
    """
    here: dict[int, list[StridedCopy]] = {}
    pace = Pace()
    for copy in copies:
        for one in copy.between_regions():
            pace.keep()
            if one.source.region != one.target.region:
                raise ValueError("bytes of one region cannot be received in another")
            here.setdefault(one.target.region, []).append(one)
    if here.keys() != set(range(len(regions))):
        raise ValueError(f"the plan is for {len(here)} regions, not {len(regions)}")
    jobs: list[CopyJob] = []
    for index, within in here.items():
        pace.keep()
        jobs.append(_Rearrangement(within, regions[index]))
    return jobs


def _within_one_region(copy: StridedCopy) -> StridedCopy:
    source = dataclasses.replace(copy.source, region=0)
    return dataclasses.replace(
        copy, source=source, target=dataclasses.replace(copy.target, region=0)
    )


class _Rearrangement(CopyJob):
    """All that moves within one region."""

    def __init__(self, copies: Sequence[StridedCopy], blocks: KVBlocks) -> None:
        first = copies[0]
        self._blocks = blocks
        self._copies = [_within_one_region(copy) for copy in copies]
        self._tokens = first.target.segments * first.segment_tokens
        theirs = first.source.segments * first.segment_tokens
        self._group = math.lcm(theirs, self._tokens) // self._tokens
        self._source_nbytes, rest = divmod(blocks.block_nbytes * theirs, self._tokens)
        if rest or len(blocks) % self._group:
            raise ValueError(
                f"{len(blocks)} blocks of {self._tokens} tokens are no whole number "
                f"of blocks of {theirs} tokens"
            )
        self._part(slice(0, self._group))  # refuses what the plan is not for

    @property
    def nbytes(self) -> int:
        return self._blocks.nbytes

    def steps(self) -> Generator[None, None, None]:
        if self._blocks.overlaps:
            raise ValueError("a block is there twice: what should land in it?")
        group_nbytes = self._group * self._blocks.block_nbytes
        some = self._group * max(1, _PIECE_NBYTES // max(1, group_nbytes))
        for first in range(0, len(self._blocks), some):
            for job in self._part(slice(first, first + some)):
                yield from job.steps()

    def _part(self, part: slice) -> list[CopyJob]:
        """Return jobs that read a copy of some blocks and write these."""
        ids = torch.from_numpy(self._blocks.block_ids[part])
        pool = self._blocks.pool.detach()
        landing = KVBlocks(pool, ids)
        received = pool[ids.to(pool.device)].reshape(-1).view(torch.uint8)
        source = received.view(-1, self._source_nbytes) if len(ids) else received
        span = Span(len(ids) * self._tokens)
        return reshard_jobs(self._copies, [source], [landing], span)
