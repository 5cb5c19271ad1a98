"""A resharding plan done to tensors: regions of one rank into regions of another.

What a plan says is checked against the tensors before a byte moves: a copy that does
not fit is refused, it never reaches beyond a block.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy
import numpy.typing
import torch

from asynckv.parallel.copies import CopySide, Span, StridedCopy
from asynckv.tensors.blocks import KVBlocks, KVMemory
from asynckv.tensors.jobs import CopyJob, run_jobs

__all__ = ("reshard", "reshard_jobs")

_PIECE_NBYTES: Final = 2**20
_UNITS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

_Ids = numpy.typing.NDArray[numpy.int64]


def reshard(
    copies: Iterable[StridedCopy],
    sources: Sequence[KVMemory],
    targets: Sequence[KVMemory],
    span: Span,
) -> None:
    """Copy what one read of a plan says, in the calling thread.

    ``sources`` and ``targets`` are the two ranks' regions, in their order; the first
    dimension of each counts the blocks of ``span``, whatever the dtype and the other
    dimensions are. :func:`reshard_jobs` do the same in a ``CopyPool``.

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
    """Return the copies as jobs for ``await pool.run(jobs)``; see :func:`reshard`.

    :raises ValueError: as for :func:`reshard`, except that a block which is there
        twice is found when the job runs
    """
    origins, landings = list(map(_as_blocks, sources)), list(map(_as_blocks, targets))
    jobs: list[CopyJob] = []
    for copy in copies:
        for one in _between_regions(copy):
            sides = (
                _Side(_at(origins, one.source.region, "source"), one.source),
                _Side(_at(landings, one.target.region, "target"), one.target),
            )
            jobs.append(_ReshardJob(one, *sides, span))
    return jobs


def _as_blocks(memory: KVMemory) -> KVBlocks:
    return (
        memory if isinstance(memory, KVBlocks) else KVBlocks(memory, range(len(memory)))
    )


def _at(regions: Sequence[KVBlocks], index: int, name: str) -> KVBlocks:
    if not 0 <= index < len(regions):
        raise ValueError(f"the plan has a {name} region {index} of {len(regions)}")
    return regions[index]


def _between_regions(copy: StridedCopy) -> Iterator[StridedCopy]:
    """Yield the same copy for one pair of regions each: loops stay within blocks."""
    pairs = list(zip(copy.source.steps, copy.target.steps, strict=True))
    is_far = [bool(ours.regions or theirs.regions) for ours, theirs in pairs]
    counts = [
        range(count) if far else range(1)
        for count, far in zip(copy.counts, is_far, strict=True)
    ]
    near = [index for index, far in enumerate(is_far) if not far]
    for indices in itertools.product(*counts):
        yield dataclasses.replace(
            copy,
            counts=tuple(copy.counts[index] for index in near),
            source=_moved(copy.source, indices, near),
            target=_moved(copy.target, indices, near),
        )


def _moved(side: CopySide, indices: Sequence[int], near: Sequence[int]) -> CopySide:
    ahead = list(zip(indices, side.steps, strict=True))
    return dataclasses.replace(
        side,
        region=side.region + sum(index * step.regions for index, step in ahead),
        offset=side.offset + sum(index * step.nbytes for index, step in ahead),
        steps=tuple(side.steps[index] for index in near),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Side:
    """The blocks of one region, and where in each of them the copy goes."""

    blocks: KVBlocks
    side: CopySide

    def check(self, copy: StridedCopy, needed: int) -> None:
        last = self.side.offset + (self.side.segments - 1) * self.side.segment_nbytes
        for count, step in zip(copy.counts, self.side.steps, strict=True):
            last += (count - 1) * step.nbytes
        if self.side.offset < 0 or last + copy.nbytes > self.blocks.block_nbytes:
            raise ValueError(
                f"blocks of region {self.side.region} have {self.blocks.block_nbytes} "
                f"bytes, the plan reaches to {last + copy.nbytes}"
            )
        if needed > len(self.blocks):
            raise ValueError(
                f"region {self.side.region} has {len(self.blocks)} blocks, "
                f"the span takes {needed}"
            )

    def alignment(self) -> int:
        """Return what divides all of its places, up to 8."""
        pool, side = self.blocks.pool, self.side
        size = pool.element_size()
        return math.gcd(
            8,
            pool.data_ptr(),
            pool.storage_offset() * size,
            pool.stride(0) * size,
            self.blocks.block_nbytes,
            side.offset,
            side.segment_nbytes,
            *(step.nbytes for step in side.steps),
        )

    def view(self, copy: StridedCopy, unit: int) -> torch.Tensor:
        """Return the pool as blocks, segments, the counts, and units of one piece."""
        pool, side = self.blocks.pool.detach(), self.side
        row = self.blocks.block_nbytes // pool.element_size()
        rows = pool.as_strided((len(pool), row), (pool.stride(0), 1)).view(_UNITS[unit])
        strides = side.segment_nbytes, *(step.nbytes for step in side.steps)
        return rows.as_strided(
            (len(pool), side.segments, *copy.counts, copy.nbytes // unit),
            (rows.stride(0), *(stride // unit for stride in strides), 1),
            rows.storage_offset() + side.offset // unit,
        )


class _ReshardJob(CopyJob):
    """One copy between two regions."""

    def __init__(
        self, copy: StridedCopy, source: _Side, target: _Side, span: Span
    ) -> None:
        segments, size = copy.segments_of(span), copy.segment_tokens
        self._copy, self._source, self._target = copy, source, target
        self._sources = _places(segments, span.source_start // size, source)
        self._targets = _places(segments, span.target_start // size, target)
        self._count = len(segments)
        for side, places in ((source, self._sources), (target, self._targets)):
            side.check(copy, int(places[0][-1]) + 1 if self._count else 0)

    @property
    def nbytes(self) -> int:
        return self._count * self._copy.segment_nbytes

    def steps(self) -> Iterator[None]:
        if not self._count:
            return
        if self._target.blocks.overlaps:
            raise ValueError("a block is there twice: what should land in it?")
        copy = self._copy
        unit = math.gcd(self._source.alignment(), self._target.alignment(), copy.nbytes)
        origin = self._source.view(copy, unit)
        landing = self._target.view(copy, unit)
        piece = max(1, _PIECE_NBYTES // copy.segment_nbytes)
        for first in range(0, self._count, piece):
            part = slice(first, first + piece)
            values = _take(origin, self._ids(self._source, self._sources, part))
            _put(landing, self._ids(self._target, self._targets, part), values)
            yield

    @staticmethod
    def _ids(side: _Side, places: tuple[_Ids, _Ids], part: slice) -> tuple[_Ids, _Ids]:
        blocks, within = places
        return side.blocks.block_ids[blocks[part]], within[part]


def _places(segments: range, start: int, side: _Side) -> tuple[_Ids, _Ids]:
    """Return in which block of the request each segment is, and where in that."""
    numbers = numpy.arange(segments.start, segments.stop, dtype=numpy.int64)
    blocks, within = numpy.divmod(numbers - start, side.side.segments)
    return blocks, within


def _neighbours(blocks: _Ids, view: torch.Tensor) -> slice | None:
    """Return whole blocks that follow each other as a slice."""
    first, last = int(blocks[0]), int(blocks[-1])
    if view.shape[1] != 1 or last - first != len(blocks) - 1:
        return None
    return slice(first, last + 1) if (numpy.diff(blocks) == 1).all() else None


def _take(view: torch.Tensor, places: tuple[_Ids, _Ids]) -> torch.Tensor:
    blocks, within = places
    if (whole := _neighbours(blocks, view)) is not None:
        return view[whole, 0]
    ids = (
        torch.from_numpy(blocks).to(view.device),
        torch.from_numpy(within).to(view.device),
    )
    return view[ids]


def _put(view: torch.Tensor, places: tuple[_Ids, _Ids], values: torch.Tensor) -> None:
    blocks, within = places
    if (whole := _neighbours(blocks, view)) is not None:
        view[whole, 0].copy_(values)
        return
    ids = (
        torch.from_numpy(blocks).to(view.device),
        torch.from_numpy(within).to(view.device),
    )
    view[ids] = values.to(view.device)
