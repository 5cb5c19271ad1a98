"""A store whose Redis is frozen or killed: what that costs, once and from then on.

A put that is flushed waits for it, then sixteen gets of what Redis alone has; values in
memory are read all the while. Told are: how long after the tier's patience the last of
those that waited was let go, by direction; how long a call takes after that; and reads
of memory before, twice, for an A/A, while others waited, and after.

    PYTHONPATH=tests python -m benchmarks.redis_away [--rounds 5] [--patience 0.05]
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from asynckv.cli.bench.report import percentile
from asynckv.stores.redis import RedisTier
from asynckv.stores.tiered import TieredStore
from asynckv.testing.expectations import noise
from benchmarks.pairing.runs import Figure, arguments_of, report
from harness.redis_servers import RedisProcess, running_redis

__all__ = ("main",)

_MEMORY = 64 * 2**20
_NBYTES = 16 * 1024
_WAITING = 16
_CALLS = 1000
_HITS = 2000
_FAR = [f"far{number}" for number in range(_WAITING + _CALLS)]
_NEAR = "near"


class _Round:
    """A server, a store, and what was measured: seconds, by what they are of."""

    def __init__(self, store: TieredStore, patience_s: float) -> None:
        self._store, self._patience_s = store, patience_s
        self.took_s: dict[str, list[float]] = {}

    async def run(self, stop: Callable[[], Awaitable[None]]) -> None:
        await self._hits("hits before", _HITS)
        await self._hits("hits before, again", _HITS)
        await stop()
        # One after the other: a store would wait for loads a little, before it begins.
        await self._while_others_wait("store", [self._put_and_flush()])
        calls = [self._get(key) for key in _FAR[:_WAITING]]
        await self._while_others_wait("load", calls)
        for key in _FAR[_WAITING:]:
            await self._timed("call: get", self._get(key))
            await self._timed("call: put, flush", self._put_and_flush())
        await self._hits("hits after", _HITS)

    async def _while_others_wait(
        self, name: str, calls: Sequence[Awaitable[None]]
    ) -> None:
        waiting = [self._after_patience(name, call) for call in calls]
        tasks = [asyncio.ensure_future(one) for one in waiting]
        while not all(task.done() for task in tasks):
            await self._hits("hits while others wait", 1)
        await asyncio.gather(*tasks)

    async def _get(self, key: str) -> None:
        if await self._store.get(key) is not None:
            raise AssertionError("it is there: nothing was stopped")

    async def _put_and_flush(self) -> None:
        await self._store.put("new", noise(_NBYTES, 2))
        await self._store.flush()

    async def _after_patience(self, name: str, call: Awaitable[None]) -> None:
        began_s = time.perf_counter()
        await call
        took_s = time.perf_counter() - began_s - self._patience_s
        self.took_s.setdefault(name, []).append(took_s)

    async def _timed(self, name: str, call: Awaitable[object]) -> None:
        began_s = time.perf_counter()
        await call
        self.took_s.setdefault(name, []).append(time.perf_counter() - began_s)

    async def _hits(self, name: str, count: int) -> None:
        for _ in range(count):
            # In a task: what keeps the loop busy is to be seen.
            task = asyncio.ensure_future(self._store.get(_NEAR))
            await self._timed(name, task)


async def _measure(how: str, folder: Path, patience_s: float) -> dict[str, list[float]]:
    async with running_redis(folder) as server:
        url = f"{server.url}?patience_s={patience_s}"
        async with TieredStore(_MEMORY, [RedisTier(url)]) as store:
            for key in _FAR:
                await store.put(key, noise(_NBYTES, 0))
            await store.flush()
        async with TieredStore(_MEMORY, [RedisTier(url)], drain_s=0) as store:
            # Enough bytes to tell by how fast the tier is, as its deadline knows that.
            await store.put("large", noise(16 * 2**20, 1))
            await store.put(_NEAR, noise(_NBYTES, 0))
            await store.flush()
            measured = _Round(store, patience_s)
            await measured.run(_stop_by(how, server))
            return measured.took_s


def _stop_by(how: str, server: RedisProcess) -> Callable[[], Awaitable[None]]:
    async def freeze() -> None:
        server.freeze()

    return freeze if how == "frozen" else server.kill


def _figures(how: str, rounds: Sequence[dict[str, list[float]]]) -> Iterator[Figure]:
    for name in ("load", "store"):
        worst = [1e3 * max(one[name]) for one in rounds]
        what = f"{how}, {name}: let go after the patience, ms"
        yield Figure(f"{what}, median", statistics.median(worst))
        yield Figure(f"{what}, most", max(worst), at_most=10)
    for name in sorted(rounds[0].keys() - {"load", "store"}):
        p50, p99 = (
            1e6 * statistics.median(percentile(one[name], part) for one in rounds)
            for part in (0.5, 0.99)
        )
        at_most = 200 if name.startswith("call") else None
        yield Figure(f"{how}, {name}: median, us", p50, at_most=at_most)
        yield Figure(f"{how}, {name}: p99, us", p99)


def main() -> None:
    """Measure, print, and exit 1 where a limit is missed."""
    given = arguments_of(__doc__, rounds=5, patience=0.05).parse_args()
    figures = list[Figure]()
    for how in ("frozen", "dead"):
        with tempfile.TemporaryDirectory() as folder:
            rounds = [
                asyncio.run(_measure(how, Path(folder), given.patience))
                for _ in range(given.rounds)
            ]
        figures += _figures(how, rounds)
    report(figures, given)


if __name__ == "__main__":
    main()
