"""The case of the event loop: how late it runs a ticker while payload moves.

Beside it the same ticker on the same loop with nothing to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from asynckv.cli.bench.figures import percentile
from asynckv.cli.bench.measuring import Case, Sample
from asynckv.cli.bench.memory import make_memory
from asynckv.cli.bench.moving import pull
from asynckv.cli.bench.report import Subject
from asynckv.cli.bench.rig import Rig

__all__ = ("EDGES_MS", "open_lag", "tick")

EDGES_MS = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 1000.0)
_EVERY_S = 0.001


async def tick(ticks: int) -> list[float]:
    """Return by how many milliseconds each of so many ticks of 1 ms came late."""
    lags_ms = []
    for _ in range(ticks):
        began_s = time.perf_counter()
        await asyncio.sleep(_EVERY_S)
        lags_ms.append((time.perf_counter() - began_s - _EVERY_S) * 1e3)
    return lags_ms


@contextlib.asynccontextmanager
async def open_lag(rig: Rig, subject: Subject, ticks: int) -> AsyncIterator[Case]:
    """Yield the case of back-to-back transfers; its value is the p99 of a round."""
    memory = await rig.in_thread(make_memory, subject.parts, subject.part_nbytes)
    tokens = rig.new_tokens()
    entry_id = await rig.lookup.insert(
        tokens, None, memory.layers, None, None, ttl_s=None
    )

    async def ours() -> Sample:
        ticker = asyncio.create_task(tick(ticks), name="ticker of the bench")
        moved = 0
        try:
            while not ticker.done():
                await pull(rig.lookup, tokens, memory)
                moved += memory.nbytes
        finally:
            ticker.cancel()
            await asyncio.wait({ticker})
        return _late(ticker.result(), moved)

    async def idle() -> Sample:
        return _late(await tick(ticks))

    try:
        yield Case(ours, {"idle loop": idle}, EDGES_MS)
    finally:
        await rig.lookup.withdraw(entry_id)


def _late(lags_ms: list[float], moved: int = 0) -> Sample:
    return Sample(percentile(lags_ms, 0.99), moved, tuple(lags_ms))
