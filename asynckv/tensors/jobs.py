"""Copies that know by themselves how to go on, piece by piece."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator

import torch

__all__ = ("CopyJob", "run_jobs")


class CopyJob(abc.ABC):
    """Work for a :class:`~asynckv.tensors.copying.CopyPool`: one thread does it.

    Several jobs of a call run beside each other, so no two may write one place.
    """

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """About how many bytes it copies."""

    @abc.abstractmethod
    def steps(self) -> Iterator[None]:
        """Copy, and yield after each piece of about 1 MiB. May be left in between."""


def run_jobs(jobs: Iterable[CopyJob]) -> None:
    """Do all of it in the calling thread.

    :raises Exception: what a job raises; the jobs after it are not begun
    """
    with torch.inference_mode():
        for job in jobs:
            for _ in job.steps():
                pass
