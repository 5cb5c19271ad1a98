"""The Redis tier beside redis-py's asyncio client with hiredis, in one run.

A redis-server of its own on loopback, eight values at a time on either side. What the
tier moves is verified by its digest and lands where it is to stay; what redis-py brings
is left in the ``bytes`` that it makes, and not looked at. Then the same by TLS, and
2,048 keys that are asked for at once, also by valkey-glide where that is installed.

    PYTHONPATH=tests python -m benchmarks.redis_tier [--rounds 7] [--only 16MiB]
        [--lanes 4]
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import redis.asyncio

from asynckv.abc.tiers import TierResult
from asynckv.stores.redis import RedisTier
from asynckv.testing.certificates import Authority
from asynckv.testing.expectations import expect
from benchmarks.pairing.runs import Figure, arguments_of, ratio_of, report
from benchmarks.pairing.tiers import (
    Batch,
    Side,
    TierSide,
    by_batches,
    figures_beside,
    lag,
    memories_of,
    take_turns,
)
from harness.redis_servers import running_redis, tls_options

__all__ = ("main",)

_AT_ONCE = 8
_CALLS = 2
_TOTAL = 256 * 2**20
_SIZES = {"2MiB": 2 * 2**20, "16MiB": 16 * 2**20}
_BARS = {
    "2MiB": {("get", "redis-py"): 2.5, ("put", "redis-py"): 1.05},
    "16MiB": {("get", "redis-py"): 3.5, ("put", "redis-py"): 1.8},
    "2MiB TLS": {("get", "redis-py"): 1.0},
    "16MiB TLS": {("get", "redis-py"): 1.0},
}
_PREFIX = 2048
_STORED = 1500

_Both: TypeAlias = tuple[RedisTier, redis.asyncio.Redis]


class _ByClient(Side):
    def __init__(
        self, client: redis.asyncio.Redis, count: int, memories: Sequence[memoryview]
    ) -> None:
        self._client, self._count, self._memories = client, count, memories

    async def put(self) -> None:
        await by_batches(self._count, self._memories, _AT_ONCE, self._set)

    async def get(self) -> None:
        await by_batches(self._count, self._memories, _AT_ONCE, self._get)

    async def _set(self, batch: Batch) -> None:
        for job, memory in batch:
            await self._client.set(f"c1/{job}", memory)

    async def _get(self, batch: Batch) -> None:
        for job, memory in batch:
            data = await self._client.get(f"c1/{job}")
            expect(len(data) == len(memory), "another length")


async def _measure(name: str, nbytes: int, both: _Both, rounds: int) -> list[Figure]:
    tier, client = both
    count = max(_TOTAL // nbytes, 2 * _AT_ONCE)
    sides = {
        "redis-py": _ByClient(client, count, memories_of(nbytes, _AT_ONCE)),
        "tier": TierSide(tier, count, memories_of(nbytes, _AT_ONCE), calls=_CALLS),
    }
    found = await take_turns(sides, rounds)
    return figures_beside(name, found, count * nbytes, _BARS[name])


async def _prefix(both: _Both, rounds: int) -> list[Figure]:
    tier, client = both
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
    sides = {"redis-py": by_client, "tier": by_tier, "again": by_client}
    if importlib.util.find_spec("glide") is not None:
        sides["glide"] = await _by_glide(client, keys)
    took: dict[str, list[float]] = {name: [] for name in sides}
    lags_s: list[float] = []
    for number in range(rounds + 1):
        for name, ask in sides.items():
            began_s = time.perf_counter()
            async with lag() as late_s:
                found = await ask()
                took_s = time.perf_counter() - began_s
            expect(found == [at < _STORED for at in range(_PREFIX)], "wrong keys")
            if number:
                took[name].append(took_s)
                lags_s += [late_s()] * (name == "tier")
    head, bars = f"prefix of {_PREFIX}", {"redis-py": 0.25, "glide": 0.5}
    return [
        *(
            Figure(
                f"{head}: time / {name}", ratio_of(took["tier"], took[name]), None, bar
            )
            for name, bar in bars.items()
            if name in took
        ),
        Figure(f"{head}: A/A", ratio_of(took["redis-py"], took["again"])),
        Figure(f"{head}: ms", 1e3 * statistics.median(took["tier"])),
        Figure(f"{head}: most lag, ms", 1e3 * statistics.median(lags_s)),
    ]


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


@contextlib.asynccontextmanager
async def _both(url: str, lanes: int) -> AsyncIterator[_Both]:
    sign = "&" if "?" in url else "?"
    client = redis.asyncio.Redis.from_url(url, socket_timeout=60)
    async with RedisTier(f"{url}{sign}lanes={lanes}") as tier, client:
        await tier.probe()
        yield tier, client


async def _measure_all(
    folder: Path, only: Sequence[str], rounds: int, lanes: int, *, tls: bool
) -> list[Figure]:
    figures = []
    wanted = [name for name in _SIZES if name in only]
    async with running_redis(folder) as server, _both(server.url, lanes) as both:
        for name in wanted:
            figures += await _measure(name, _SIZES[name], both, rounds)
        if "prefix" in only:
            figures += await _prefix(both, 5 * rounds)
    if not tls or not wanted:
        return figures
    keys = Authority(folder).issue()
    async with running_redis(folder, *tls_options(keys)) as server:
        url = f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={keys.ca}"
        async with _both(url, lanes) as both:
            for name in wanted:
                figures += await _measure(f"{name} TLS", _SIZES[name], both, rounds)
    return figures


def main() -> None:
    """Measure, print, and exit 1 where a limit is missed."""
    parser = arguments_of(__doc__, (*_SIZES, "prefix"), rounds=7, lanes=4)
    parser.add_argument("--no-tls", action="store_true")
    given = parser.parse_args()
    print(f"redis-py {redis.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        options = given.only, given.rounds, given.lanes
        measuring = _measure_all(Path(folder), *options, tls=not given.no_tls)
        figures = asyncio.run(measuring)
    report(figures, given)


if __name__ == "__main__":
    main()
