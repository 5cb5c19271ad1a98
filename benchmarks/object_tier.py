"""The object tier beside bare obstore, on a real S3 server and on files, in one run.

As many requests at a time on either side as the tier makes: 8 puts, 16 gets. Bare
obstore has as many workers; the tier has eight callers with two values each. A get ends
when the value is where it goes: bare obstore's is copied there by threads, too. What
the tier moves is verified by its digest, in threads of the rig; what stands beside it
is not; ``--unverified`` leaves that out. Rounds alternate; a ratio is the median of
those of each round, and the A/A is of bare obstore with itself. The server is moto's,
in Python: it is slow and shares the cores. Files are in memory if the folder is.

    PYTHONPATH=tests python -m benchmarks.object_tier [--rounds 5] [--folder /dev/shm]
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy
import obstore
from obstore.store import LocalStore, ObjectStore

from asynckv.abc.tiers import TierMemory, TierResult, TierValue, WantedValue
from asynckv.protocol.wire import digest_of
from asynckv.stores.objects import ObjectTier
from harness.moto_server import MotoServer

__all__ = ("main",)

_PUTS, _GETS = 8, 16
_CALLS = 8
_LEAST_TOTAL = 256 * 2**20
_LEAST_VALUES = 32
# The server keeps in memory what has no more than 16 MiB, its header included.
_SIZES = {"2MiB": 2 * 2**20, "16MiB": 16 * 2**20 - 4096}
_BARS = {"get": 0.85, "put": 0.9}


def _total(nbytes: int) -> int:
    """Return how much a round moves: many values, that a beginning is no matter."""
    return max(_LEAST_TOTAL, _LEAST_VALUES * nbytes)


class _Wanted(WantedValue):
    is_held = False

    def __init__(self, key: str, memory: memoryview) -> None:
        super().__init__(key)
        self.memory = memory
        self.digest = b""

    @property
    def lent_nbytes(self) -> int:
        return len(self.memory)

    async def place(self, header: bytes | memoryview) -> TierMemory:
        self.header_nbytes, self.digest = 16, bytes(header[:16])
        return TierMemory(len(self.memory), [self.memory])


class _Rig:
    """Memory, threads, and how late the loop is."""

    def __init__(self, nbytes: int, *, is_verified: bool) -> None:
        self.nbytes, self.is_verified = nbytes, is_verified
        self.memories = [memoryview(mmap.mmap(-1, nbytes)) for _ in range(_GETS)]
        for memory in self.memories:
            memory[:] = os.urandom(nbytes)
        self.pool = concurrent.futures.ThreadPoolExecutor(2)
        self.lag_s = 0.0

    async def run(
        self, works: Sequence[Callable[[Iterator[int]], Awaitable[None]]]
    ) -> float:
        """Let all of them work on what there is to do; return how long they took."""
        jobs = iter(range(_total(self.nbytes) // self.nbytes))
        self.lag_s = 0.0
        ticking = asyncio.ensure_future(self.tick())
        began = time.perf_counter()
        await asyncio.gather(*(work(jobs) for work in works))
        seconds = time.perf_counter() - began
        ticking.cancel()
        await asyncio.wait({ticking})
        return seconds

    async def tick(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            self.lag_s = max(self.lag_s, time.perf_counter() - before - 0.001)


class _Bare:
    """Obstore as its documentation has it, and a copy to where the value goes."""

    def __init__(self, rig: _Rig, store: ObjectStore, prefix: str) -> None:
        self._rig, self._store, self._prefix = rig, store, prefix

    async def put(self) -> float:
        async def work(memory: memoryview, jobs: Iterator[int]) -> None:
            for job in jobs:
                path = f"{self._prefix}/{job}"
                await obstore.put_async(self._store, path, memory, use_multipart=False)

        return await self._run(work, _PUTS)

    async def get(self) -> float:
        loop = asyncio.get_running_loop()

        def land(data: Any, memory: memoryview) -> None:
            target = numpy.frombuffer(memory, numpy.uint8)
            numpy.copyto(target, numpy.frombuffer(data, numpy.uint8))

        async def work(memory: memoryview, jobs: Iterator[int]) -> None:
            for job in jobs:
                found = await obstore.get_async(self._store, f"{self._prefix}/{job}")
                data = await found.bytes_async()
                await loop.run_in_executor(self._rig.pool, land, data, memory)

        return await self._run(work, _GETS)

    async def _run(
        self, work: Callable[[memoryview, Iterator[int]], Awaitable[None]], count: int
    ) -> float:
        memories = self._rig.memories[:count]
        return await self._rig.run([functools.partial(work, m) for m in memories])


class _Tier:
    """The tier, as a store has it: some values at a time, verified."""

    def __init__(self, rig: _Rig, tier: ObjectTier) -> None:
        self._rig, self._tier = rig, tier

    async def put(self) -> float:
        return await self._run(self._store)

    async def get(self) -> float:
        return await self._run(self._fetch)

    async def _run(
        self, call: Callable[[list[tuple[int, memoryview]]], Awaitable[None]]
    ) -> float:
        async def work(memories: Sequence[memoryview], jobs: Iterator[int]) -> None:
            some = len(memories)
            while batch := list(
                zip(itertools.islice(jobs, some), memories, strict=False)
            ):
                await call(batch)

        memories, some = self._rig.memories, _GETS // _CALLS
        parts = [memories[at : at + some] for at in range(0, _GETS, some)]
        return await self._rig.run([functools.partial(work, part) for part in parts])

    async def _digests(self, batch: list[tuple[int, memoryview]]) -> list[bytes]:
        if not self._rig.is_verified:
            return [bytes(16)] * len(batch)
        loop = asyncio.get_running_loop()
        memories = [memory for _, memory in batch]
        return await loop.run_in_executor(
            self._rig.pool, lambda: list(map(digest_of, memories))
        )

    async def _store(self, batch: list[tuple[int, memoryview]]) -> None:
        headers = await self._digests(batch)
        values = [
            TierValue(f"k1/{job}", header, TierMemory(len(one), [one]))
            for (job, one), header in zip(batch, headers, strict=True)
        ]
        results = set(await self._tier.store(values))
        _expect(results == {TierResult.DONE}, f"stored: {results}")

    async def _fetch(self, batch: list[tuple[int, memoryview]]) -> None:
        wanted = [_Wanted(f"k1/{job}", memory) for job, memory in batch]
        results = set(await self._tier.fetch(wanted))
        _expect(results == {TierResult.DONE}, f"fetched: {results}")
        digests = await self._digests(batch)
        _expect(digests == [one.digest for one in wanted], "wrong bytes")


async def _measure(
    kind: str, name: str, options: argparse.Namespace, store: ObjectStore, prefix: str
) -> None:
    rig = _Rig(_SIZES[name], is_verified=not options.unverified)
    async with ObjectTier(store, f"{prefix}/tier") as opened:
        await opened.probe()
        bare, tier = _Bare(rig, store, f"{prefix}/bare"), _Tier(rig, opened)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await rig.tick()
        idle_s = rig.lag_s
        took: dict[str, list[float]] = {}
        lags_s: dict[str, list[float]] = {"bare": [], "tier": []}
        for _ in range(options.rounds + 1):
            for verb in ("put", "get"):
                took.setdefault(f"{verb} bare", []).append(await getattr(bare, verb)())
                lags_s["bare"].append(rig.lag_s)
                took.setdefault(f"{verb} tier", []).append(await getattr(tier, verb)())
                lags_s["tier"].append(rig.lag_s)
                took.setdefault(f"{verb} again", []).append(await getattr(bare, verb)())
    for verb in ("put", "get"):
        sides = [took[f"{verb} {side}"][1:] for side in ("bare", "tier", "again")]
        ratio, again = _ratio(sides[0], sides[1]), _ratio(sides[0], sides[2])
        rate = _total(_SIZES[name]) / statistics.median(sides[1]) / 1e6
        is_kept = "ok" if ratio >= _BARS[verb] else "NO"
        _say(
            f"{kind:4} {name:5} {verb} {ratio:5.2f} of bare obstore, bar "
            f"{_BARS[verb]}: {is_kept}; A/A {again:.2f}; the tier: {rate:.0f} MB/s"
        )
    lags_ms = [1e3 * statistics.median(lags_s[side]) for side in ("tier", "bare")]
    _say(
        f"{kind:4} {name:5} most lag of the loop in the median round: "
        f"{lags_ms[0]:.1f} ms, with bare obstore {lags_ms[1]:.1f} ms, idle "
        f"{1e3 * idle_s:.1f} ms; bar 10 ms above that"
    )
    rig.pool.shutdown()


def _ratio(one: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def _expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise AssertionError(otherwise)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where the files are")
    parser.add_argument("--unverified", action="store_true")
    parser.add_argument("--only", choices=("s3", "file"), default=None)
    options = parser.parse_args()
    if options.only != "file":
        server = MotoServer()
        try:
            for name in _SIZES:
                bucket = server.bucket()
                asyncio.run(_measure("s3", name, options, bucket, name))
        finally:
            server.kill()
    if options.only != "s3":
        for name in _SIZES:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                store, path = LocalStore(), folder.strip("/")
                asyncio.run(_measure("file", name, options, store, path))
    _say(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
