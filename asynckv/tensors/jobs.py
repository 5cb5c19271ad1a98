"""Copies that know by themselves how to go on, piece by piece.

Those between places of the host's memory take as few calls as can be: what is longer
than the caches the C library's ``memmove`` writes past them, if one call is as long.
Where that is 99 MiB, 1 GiB by calls of 128 MiB took two thirds of the time, and of the
CPU, that it took by calls of 16 MiB.
"""

from __future__ import annotations

import abc
import ctypes
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Final

import torch

from asynckv.tensors.runs import Runs, landed

__all__ = (
    "CopyJob",
    "LongCopy",
    "Pace",
    "RunsCopy",
    "long_copies",
    "run_jobs",
)


_AT_A_TIME_S: Final = 0.25e-3

_SHORTEST_S: Final = 1e-6
"""Letting go of the GIL is not enough: who waits for it must have time to wake up."""


class CopyJob(abc.ABC):
    """Work for a :class:`~asynckv.tensors.copying.CopyPool`: one thread does it.

    Several jobs of a call run beside each other, so no two may write one place.
    """

    limit_s: float | None = None
    """A thread that is longer at one step never comes back: it is given up."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """About how many bytes it copies."""

    @abc.abstractmethod
    def steps(self) -> Generator[None, None, None]:
        """Copy, and yield after each piece of about 1 MiB. May be left in between."""

    def give_up(self) -> Exception:
        """A thread is at it for ever, with all that it copies. Return what to say."""
        return TimeoutError("a copy does not get on")


class Pace:
    """Lets other threads in while Python code works its way through many things.

    Without that a thread which computes keeps the event loop waiting for the GIL,
    5 ms at a time.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,  # noqa: TID251 - a thread's
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._since_s = clock()

    def keep(self) -> None:
        """Stand back for a moment, if it has been a quarter of a millisecond."""
        if self._clock() - self._since_s > _AT_A_TIME_S:
            self._sleep(_SHORTEST_S)
            self._since_s = self._clock()


def run_jobs(jobs: Iterable[CopyJob]) -> None:
    """Do all of it in the calling thread.

    :raises Exception: what a job raises; the jobs after it are not begun
    """
    with torch.inference_mode():
        for job in jobs:
            for _ in job.steps():
                pass


_LONGEST_NBYTES: Final = 128 * 2**20
_SHORTEST_NBYTES: Final = 2**20
_PAGE_NBYTES: Final = 4096
_ROOM_NBYTES: Final = 512 * 1024


class LongCopy(CopyJob):
    """Bytes at ``source`` copied to ``target``, addresses in what ``keeps`` keeps.

    One call, which cannot be stopped: at most 128 MiB.
    """

    def __init__(self, source: int, target: int, nbytes: int, keeps: object) -> None:
        self._source = source
        self._target = target
        self._nbytes = nbytes
        self._keeps = keeps

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def steps(self) -> Generator[None, None, None]:
        ctypes.memmove(self._target, self._source, self._nbytes)  # without the GIL
        yield


class RunsCopy(CopyJob):
    """Pieces, one after the other, copied to ``target``."""

    def __init__(self, pieces: Sequence[memoryview], target: Runs) -> None:
        self._pieces = pieces
        self._target = target

    @property
    def nbytes(self) -> int:
        return self._target.nbytes

    def steps(self) -> Generator[None, None, None]:
        blocks, start = self._target.small_blocks, 0
        if blocks is None:
            for _ in landed(self._pieces, self._target):
                yield
            return
        for piece in self._pieces:
            for begin in range(0, len(piece), _ROOM_NBYTES):
                blocks.put(start + begin, piece[begin : begin + _ROOM_NBYTES])
                yield
            start += len(piece)


def long_copies(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> list[LongCopy]:
    """Return what copies each source to its target, as many bytes, both dense.

    Where one pair of neighbours follows another they are copied together, a half by
    each of two threads.
    """
    keeps = [*sources, *targets]
    jobs = []
    for source, target, nbytes in _runs(sources, targets):
        some = -(-nbytes // (2 * _PAGE_NBYTES)) * _PAGE_NBYTES
        some = min(max(some, _SHORTEST_NBYTES), _LONGEST_NBYTES)
        for start in range(0, nbytes, some):
            count = min(some, nbytes - start)
            jobs.append(LongCopy(source + start, target + start, count, keeps))
    return jobs


def _runs(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> list[tuple[int, int, int]]:
    """Return from where to where how many bytes go, neighbours as one."""
    runs: list[tuple[int, int, int]] = []
    for source, target in zip(sources, targets, strict=True):
        if source.nbytes != target.nbytes:
            raise ValueError(f"{source.nbytes} bytes are not {target.nbytes}")
        begin, place, nbytes = source.data_ptr(), target.data_ptr(), source.nbytes
        if runs:
            last, last_place, last_nbytes = runs[-1]
            if (begin, place) == (last + last_nbytes, last_place + last_nbytes):
                runs[-1] = last, last_place, last_nbytes + nbytes
                continue
        if nbytes:
            runs.append((begin, place, nbytes))
    return runs
