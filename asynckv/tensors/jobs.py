"""Copies that know by themselves how to go on, piece by piece."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Generator, Iterable
from typing import Final

import torch

__all__ = ("CopyJob", "Pace", "run_jobs")

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
