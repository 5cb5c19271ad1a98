"""Which core who runs on, while round trips are timed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

__all__ = ("on_two_cores",)


@contextlib.contextmanager
def on_two_cores(*pids: int) -> Iterator[None]:
    """Keep this process and those others on a core each, with all their threads.

    Left alone, the scheduler puts two blocking threads on one core or on two as it
    likes, and a ping between them takes 16 us or 70; event loops it keeps on two.
    """
    cores = sorted(os.sched_getaffinity(0))
    _keep_on(os.getpid(), cores[:1])
    for pid in pids:
        _keep_on(pid, cores[-1:])
    try:
        yield
    finally:
        for pid in (os.getpid(), *pids):
            _keep_on(pid, cores)


def _keep_on(pid: int, cores: Sequence[int]) -> None:
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task), cores)
