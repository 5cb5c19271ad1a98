"""What this process has in use: what must not grow however long it works."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import gc
import os
import threading
from pathlib import Path

from asynckv.buffers.lookup import LookupBuffer

__all__ = ("Footprint", "count_threads")

_PAGES = 1


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Counts at one moment, of this process and of one buffer.

    ``resident_bytes`` are without what malloc keeps for later, where it can be
    told not to. ``remembered`` entries have left: a buffer knows the last of them,
    so many and so long, to answer who asks again.
    """

    tasks: int
    threads: int
    descriptors: int
    resident_bytes: int
    leased: int
    waiting: int
    remembered: int

    @classmethod
    def now(cls, buffer: LookupBuffer) -> Footprint:
        """Look. Blocks for the garbage collector."""
        gc.collect()
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)
        state = buffer.statistics()
        pages = int(Path("/proc/self/statm").read_text().split()[_PAGES])
        return cls(
            tasks=len(asyncio.all_tasks()),
            threads=count_threads(),
            descriptors=len(os.listdir("/proc/self/fd")),
            resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
            leased=state.leased,
            waiting=state.waiting_inserts + state.waiting_selects,
            remembered=len(buffer.ledger.table.tombstones),
        )


def count_threads() -> int:
    """Return how many of asynckv's threads run. Those that copy end when idle."""
    return sum(t.name.startswith("asynckv") for t in threading.enumerate())
