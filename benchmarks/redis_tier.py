"""The Redis tier beside redis-py's asyncio client with hiredis, in one run.

A redis-server of its own on loopback, eight values at a time on either side. What the
tier moves is verified by its digest, in threads of the rig, and lands where it is to
stay; what redis-py brings is left in the ``bytes`` that it makes, and not looked at.
Rounds alternate; a ratio is the median of those of each round, and the A/A is of
redis-py with itself. How late the loop is stands beside how late a process is at the
same time that does nothing: on a busy machine both are. Then the same by TLS, and 2,048
keys that are asked for at once, also by valkey-glide where that is installed.

    python -m benchmarks.redis_tier [--rounds 7] [--only 16MiB] [--lanes 4]
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import importlib
import importlib.util
import itertools
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import redis.asyncio

from asynckv.abc.tiers import TierMemory, TierResult, TierValue, WantedValue
from asynckv.protocol.wire import digest_of
from asynckv.stores.redis import RedisTier
from asynckv.testing.certificates import Authority
from harness.redis_servers import RedisProcess, running_redis, tls_options

__all__ = ("main",)

_AT_ONCE = 8
_CALLS = 2
_TOTAL = 256 * 2**20
_SIZES = {"2MiB": 2 * 2**20, "16MiB": 16 * 2**20}
_BARS = {
    ("2MiB", "get"): 2.5,
    ("16MiB", "get"): 3.5,
    ("2MiB", "put"): 1.05,
    ("16MiB", "put"): 1.8,
    ("2MiB TLS", "get"): 1.0,
    ("16MiB TLS", "get"): 1.0,
}
_PREFIX = 2048
_STORED = 1500
_MOST_LAG_S = 0.010

_Batch = Sequence[tuple[int, memoryview]]

_TICK = """
import select, sys, time
most_s = 0.0
while True:
    before = time.perf_counter()
    asked, _, _ = select.select([sys.stdin], [], [], 0.001)
    most_s = max(most_s, time.perf_counter() - before - 0.001)
    if asked:
        if not sys.stdin.readline():
            break
        print(most_s, flush=True)
        most_s = 0.0
"""


class _Idle:
    """A process that does nothing, and says how late that was at most."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TICK], stdin=pipe, stdout=pipe, text=True
        )

    def lag_s(self) -> float:
        """Return the most since this was last asked."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


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
        return TierMemory(len(self.memory), [self.memory], [self.memory])


def _memories(nbytes: int) -> list[memoryview]:
    made = [memoryview(mmap.mmap(-1, nbytes)) for _ in range(_AT_ONCE)]
    for number, memory in enumerate(made):
        memory[:] = os.urandom(2**20) * (nbytes // 2**20)
        memory[:8] = number.to_bytes(8, "little")
    return made


class _Side:
    """What is measured: values by ``count``, and how late the loop is meanwhile."""

    def __init__(self, nbytes: int) -> None:
        self.count = max(_TOTAL // nbytes, 2 * _AT_ONCE)
        self.memories = _memories(nbytes)
        self.lags_s: list[float] = []

    async def run(self, calls: int, call: Callable[[_Batch], Awaitable[None]]) -> float:
        """Make ``calls`` at a time until each value was moved; return seconds."""
        left = iter(range(self.count))
        each = _AT_ONCE // calls

        async def work(memories: Sequence[memoryview]) -> None:
            while batch := list(
                zip(itertools.islice(left, each), memories, strict=False)
            ):
                await call(batch)

        async with _lag(self.lags_s):
            began = time.perf_counter()
            starts = range(0, _AT_ONCE, each)
            await asyncio.gather(*(work(self.memories[k : k + each]) for k in starts))
            return time.perf_counter() - began


class _ByTier(_Side):
    def __init__(self, tier: RedisTier, nbytes: int) -> None:
        super().__init__(nbytes)
        self._tier = tier
        self._pool = concurrent.futures.ThreadPoolExecutor(2)

    async def put(self) -> float:
        return await self.run(_CALLS, self._store)

    async def get(self) -> float:
        return await self.run(_CALLS, self._fetch)

    def close(self) -> None:
        self._pool.shutdown()

    async def _digests(self, batch: _Batch) -> list[bytes]:
        loop = asyncio.get_running_loop()
        memories = [memory for _, memory in batch]
        return await loop.run_in_executor(
            self._pool, lambda: list(map(digest_of, memories))
        )

    async def _store(self, batch: _Batch) -> None:
        headers = await self._digests(batch)
        values = [
            TierValue(f"k1/{job}", header, TierMemory(len(one), [one], [one]))
            for (job, one), header in zip(batch, headers, strict=True)
        ]
        results = set(await self._tier.store(values))
        _expect(results == {TierResult.DONE}, f"stored: {results}")

    async def _fetch(self, batch: _Batch) -> None:
        wanted = [_Wanted(f"k1/{job}", memory) for job, memory in batch]
        results = set(await self._tier.fetch(wanted))
        _expect(results == {TierResult.DONE}, f"fetched: {results}")
        digests = await self._digests(batch)
        _expect(digests == [one.digest for one in wanted], "wrong bytes")


class _ByClient(_Side):
    def __init__(self, client: redis.asyncio.Redis, nbytes: int) -> None:
        super().__init__(nbytes)
        self._client = client

    async def put(self) -> float:
        return await self.run(_AT_ONCE, self._set)

    async def get(self) -> float:
        return await self.run(_AT_ONCE, self._get)

    async def _set(self, batch: _Batch) -> None:
        for job, memory in batch:
            await self._client.set(f"c1/{job}", memory)

    async def _get(self, batch: _Batch) -> None:
        for job, memory in batch:
            data = await self._client.get(f"c1/{job}")
            _expect(len(data) == len(memory), "another length")


class _Round(NamedTuple):
    seconds: float
    cpu_s: float
    lag_s: float
    idle_s: float


@contextlib.asynccontextmanager
async def _lag(lags_s: list[float]) -> AsyncIterator[None]:
    """Note how late the loop is at most meanwhile."""
    most_s = 0.0

    async def tick() -> None:
        nonlocal most_s
        while True:
            before = time.perf_counter()
            try:
                await asyncio.sleep(0.001)
            finally:  # also of the last one, which is cut short
                most_s = max(most_s, time.perf_counter() - before - 0.001)

    ticking = asyncio.ensure_future(tick())
    try:
        yield
    finally:
        ticking.cancel()
        await asyncio.wait({ticking})
        lags_s.append(most_s)


async def _measure(
    name: str, nbytes: int, tier: RedisTier, client: redis.asyncio.Redis, rounds: int
) -> None:
    by_tier, by_client, idle = _ByTier(tier, nbytes), _ByClient(client, nbytes), _Idle()
    sides: tuple[tuple[str, _ByTier | _ByClient], ...]
    sides = (("client", by_client), ("tier", by_tier), ("again", by_client))
    found: dict[str, list[_Round]] = {}
    for _ in range(rounds + 1):
        for what in ("put", "get"):
            for label, side in sides:
                idle.lag_s()
                cpu_s = time.process_time()
                seconds = await (side.put() if what == "put" else side.get())
                cpu_s = time.process_time() - cpu_s
                told = _Round(seconds, cpu_s, side.lags_s[-1], idle.lag_s())
                found.setdefault(f"{what} {label}", []).append(told)
    by_tier.close()
    idle.close()
    for what in ("put", "get"):
        _report(name, what, *(found[f"{what} {side}"][1:] for side, _ in sides))
        rate = by_tier.count * nbytes / 1e6
        seconds = statistics.median(one.seconds for one in found[f"{what} tier"][1:])
        _say(f"{name:9} {what} the tier: {rate / seconds:.0f} MB/s")


def _report(
    name: str,
    what: str,
    client: Sequence[_Round],
    tier: Sequence[_Round],
    again: Sequence[_Round],
) -> None:
    ratio = _ratio([one.seconds for one in client], [one.seconds for one in tier])
    same = _ratio([one.seconds for one in client], [one.seconds for one in again])
    cpu = _ratio([one.cpu_s for one in client], [one.cpu_s for one in tier])
    bar = _BARS.get((name, what))
    verdict = "" if bar is None else f"bar {bar}: {'ok' if ratio >= bar else 'NO'}"
    _say(
        f"{name:9} {what} of redis-py {ratio:5.2f} {verdict:12} A/A {same:.2f}, "
        f"by CPU of this process {cpu:.1f}"
    )
    above_s = statistics.median(one.lag_s - one.idle_s for one in tier)
    lag_s, idle_s, client_s = (
        statistics.median(many)
        for many in (
            [one.lag_s for one in tier],
            [one.idle_s for one in tier],
            [one.lag_s for one in client],
        )
    )
    _say(
        f"{name:9} {what} most lag in the median round: {1e3 * lag_s:.1f} ms, of an "
        f"idle process {1e3 * idle_s:.1f}, above that {1e3 * above_s:.1f} "
        f"({'ok' if above_s <= _MOST_LAG_S else 'NO'}); redis-py {1e3 * client_s:.1f}"
    )


async def _prefix(tier: RedisTier, client: redis.asyncio.Redis, rounds: int) -> None:
    keys = [f"k1/{'0' * 32}/{'0' * 32}/{at:064x}" for at in range(_PREFIX)]
    async with client.pipeline(transaction=False) as pipeline:
        for key in keys[:_STORED]:
            pipeline.set(key, b"1")
        await pipeline.execute()

    async def by_client() -> list[bool]:
        async with client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.exists(key)
            return list(map(bool, await pipeline.execute()))

    async def by_tier() -> list[bool]:
        return [one is TierResult.DONE for one in await tier.contains(keys)]

    sides: dict[str, Callable[[], Awaitable[list[bool]]]]
    sides = {"client": by_client, "tier": by_tier, "again": by_client}
    if importlib.util.find_spec("glide") is not None:
        sides["glide"] = await _by_glide(client, keys)
    took: dict[str, list[float]] = {}
    lags_s: list[float] = []
    for _ in range(rounds + 1):
        for label, ask in sides.items():
            async with _lag(lags_s if label == "tier" else []):
                began = time.perf_counter()
                found = await ask()
                took.setdefault(label, []).append(time.perf_counter() - began)
            _expect(found == [at < _STORED for at in range(_PREFIX)], "wrong keys")
    part = 1 / _ratio(took["client"][1:], took["tier"][1:])
    again = _ratio(took["client"][1:], took["again"][1:])
    _say(
        f"prefix of {_PREFIX}: {part:.3f} of redis-py's pipeline, bar 0.25: "
        f"{'ok' if part <= 0.25 else 'NO'}; A/A {again:.2f}; "
        f"{1e3 * statistics.median(took['tier'][1:]):.1f} ms; most lag "
        f"{1e3 * statistics.median(lags_s[1:]):.1f} ms"
    )
    if "glide" in took:
        part = 1 / _ratio(took["glide"][1:], took["tier"][1:])
        is_met = "ok" if part <= 0.5 else "NO"
        _say(f"prefix of {_PREFIX}: {part:.3f} of glide's batch, bar 0.5: {is_met}")


async def _by_glide(
    client: redis.asyncio.Redis, keys: Sequence[str]
) -> Callable[[], Awaitable[list[bool]]]:
    """Return what asks the same server by valkey-glide."""
    glide: Any = importlib.import_module("glide")
    port = client.connection_pool.connection_kwargs["port"]
    address = glide.NodeAddress("127.0.0.1", port)
    other = await glide.GlideClient.create(glide.GlideClientConfiguration([address]))

    async def ask() -> list[bool]:
        batch = glide.Batch(is_atomic=False)
        for key in keys:
            batch.exists([key])
        return list(map(bool, await other.exec(batch, raise_on_error=True)))

    return ask


def _ratio(one: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def _expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise AssertionError(otherwise)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextlib.asynccontextmanager
async def _both(
    server: RedisProcess, url: str, lanes: int
) -> AsyncIterator[tuple[RedisTier, redis.asyncio.Redis]]:
    sign = "&" if "?" in url else "?"
    client = redis.asyncio.Redis.from_url(url, socket_timeout=60)
    async with RedisTier(f"{url}{sign}lanes={lanes}") as tier, client:
        await tier.probe()
        yield tier, client


async def _run(folder: Path, options: argparse.Namespace) -> None:
    wanted = [one for one in _SIZES if options.only in (None, one)]
    async with (
        running_redis(folder) as server,
        _both(server, server.url, options.lanes) as sides,
    ):
        for name in wanted:
            await _measure(name, _SIZES[name], *sides, options.rounds)
        if options.only in (None, "prefix"):
            await _prefix(*sides, 5 * options.rounds)
    if options.no_tls:
        return
    tls = Authority(folder).issue()
    async with running_redis(folder, *tls_options(tls)) as server:
        url = f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={tls.ca}"
        async with _both(server, url, options.lanes) as sides:
            for name in wanted:
                await _measure(f"{name} TLS", _SIZES[name], *sides, options.rounds)


def main() -> None:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--no-tls", action="store_true")
    parser.add_argument("--only", choices=(*_SIZES, "prefix"), default=None)
    options = parser.parse_args()
    _say(f"redis-py {redis.__version__}, load {os.getloadavg()[0]:.1f} at the start")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_run(Path(folder), options))
    _say(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
