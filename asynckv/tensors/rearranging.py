"""What is left to do when a rank's blocks were received as they lay at the source.

A receiver that cannot scatter lets the bytes land raw: the source's blocks, back to
back, in its own blocks. Afterwards they are put in its own block size and layout, where
they are: what vLLM does by ``kv_postprocess_*_on_receive``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Sequence
from typing import Final

import torch

from asynckv.parallel.copies import Span, StridedCopy
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.jobs import CopyJob, Pace, run_jobs
from asynckv.tensors.resharding import reshard_jobs

__all__ = ("rearrange", "rearrange_jobs")

_PIECE_NBYTES: Final = 2**20


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
