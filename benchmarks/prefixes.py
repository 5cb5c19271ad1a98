"""How long it takes to find a prefix of 2,048 blocks, here and 10 ms away.

Here: in the memory of this process, among a million keys. Away: at a server with Redis
below its memory, behind a proxy that delays each byte, each way. It is asked as an
engine's scheduler asks: of all ranks at once, and what is found is held. Values are
those of chunks of 256 tokens, and of each block of 16. In memory they are found; where
Redis alone has them it is asked which are there, and nothing is fetched. The median is
told, and what of it is not the way there and back.

    PYTHONPATH=tests python -m benchmarks.prefixes [--rounds 15]
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import torch

import asynckv
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import (
    KVEngine,
    namespace_of,
    prefix_block_keys,
    rank_block_keys,
)
from asynckv.connectors.store.lookup import PrefixLookup
from asynckv.testing.faults.proxy import latency
from benchmarks.pairing.runs import Figure, arguments_of, report
from harness.redis_servers import running_redis

__all__ = ("main",)

_DELAY_S = 0.010
_BAR, _BAR_HERE = 25, 1
"""Milliseconds."""
_STORED = 1_000_000
_BLOCKS = 2048
_BLOCK_TOKENS = 16
_RANKS = (1, 8)
_CHUNKS = (256, _BLOCK_TOKENS)
_MODEL = "toy"
_VALUE = torch.zeros(16, dtype=torch.uint8)


async def _median_s(rounds: int, call: Callable[[int], Awaitable[object]]) -> float:
    await call(0)
    took_s = []
    for number in range(1, rounds + 1):
        began_s = time.perf_counter()
        await call(number)
        took_s.append(time.perf_counter() - began_s)
    return statistics.median(took_s)


@contextlib.asynccontextmanager
async def _serving(redis: str) -> AsyncIterator[str]:
    """Serve a store in a process of its own, and yield where."""
    command = ("-m", "asynckv", "serve", "--listen", "tcp://127.0.0.1:0")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *command, "--store", "256MiB", "--tier", redis),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        told = (await process.stdout.readline()).decode()
        yield next(word for word in told.split() if word.startswith("tcp://"))
    finally:
        process.terminate()
        await process.wait()


async def _measure_here(rounds: int) -> Figure:
    keys = prefix_block_keys(range(_BLOCKS * _BLOCK_TOKENS), _BLOCK_TOKENS)
    others = (f"{number:064x}" for number in range(_STORED - _BLOCKS))
    async with asynckv.StoreBuffer("1GiB") as store:
        await store.put_many((key, _VALUE) for key in (*keys, *others))

        async def match(number: int) -> None:
            if await store.match_prefix(keys) != _BLOCKS:
                raise AssertionError("not all of it was found")

        took_s = await _median_s(10 * rounds, match)
        stored = store.statistics().keys
    return Figure(f"{_BLOCKS} of {stored} keys here, ms", 1e3 * took_s, None, _BAR_HERE)


async def _measure(redis: str, rounds: int) -> list[Figure]:
    figures = []
    tokens = range(_BLOCKS * _BLOCK_TOKENS)
    for chunk_tokens in _CHUNKS:
        chunks = prefix_block_keys(tokens, chunk_tokens)
        for ranks in _RANKS:
            engine = KVEngine(engine_id="E", block_size=_BLOCK_TOKENS, tp_size=ranks)
            space = namespace_of(engine)
            by_rank = [rank_block_keys(chunks, space, rank) for rank in range(ranks)]
            keys = [key for some in by_rank for key in some]
            what = f"{len(keys):6} keys, TP {ranks}, chunks of {chunk_tokens}"
            async with _serving(redis) as url:
                async with asynckv.connect(url, fingerprint=_MODEL) as peer:
                    await peer.store.put_many((key, _VALUE) for key in keys)
                figures += await _find(url, engine, chunks, what, rounds)
            async with _serving(redis) as url:  # its memory is empty
                figures += await _match(url, by_rank, what, rounds)
    return figures


async def _find(
    url: str, engine: KVEngine, chunks: tuple[str, ...], what: str, rounds: int
) -> list[Figure]:
    async with latency(url, _DELAY_S) as far:
        extra: dict[str, object] = {"store": far.url, "fingerprint": _MODEL}
        extra["lookup_timeout_s"] = 10.0
        finder = PrefixLookup(
            KVTransferConfig(kv_connector_extra_config=extra), engine, None
        )

        async def find(number: int) -> None:
            found = await finder.find(chunks, number)
            finder.let_go(number)
            if found != len(chunks):
                raise AssertionError(f"{found} of {len(chunks)} were found")

        try:
            took_s = await _median_s(rounds, find)
        finally:
            await finder.aclose()
        return _figures(f"{what}: in memory, found and held", took_s)


async def _match(
    url: str, by_rank: list[list[str]], what: str, rounds: int
) -> list[Figure]:
    async with (
        latency(url, _DELAY_S) as far,
        asynckv.connect(far.url, fingerprint=_MODEL) as peer,
    ):

        async def match(number: int) -> None:
            asked = (peer.store.match_prefix(keys) for keys in by_rank)
            found = await asyncio.gather(*asked)
            if set(found) != {len(by_rank[0])} or found[0].ready:
                raise AssertionError(f"{found} of {len(by_rank[0])} were found")

        return _figures(
            f"{what}: in Redis alone, matched", await _median_s(rounds, match)
        )


def _figures(what: str, took_s: float) -> list[Figure]:
    beside_s = took_s - 2 * _DELAY_S
    return [
        Figure(f"{what}, ms", 1e3 * took_s, at_most=_BAR),
        Figure(f"{what}, ms beside the way", 1e3 * beside_s),
    ]


async def _measure_all(rounds: int) -> list[Figure]:
    here = await _measure_here(rounds)
    with tempfile.TemporaryDirectory() as folder:
        async with running_redis(Path(folder)) as redis:
            return [here, *await _measure(redis.url, rounds)]


def main() -> None:
    """Measure, print, and exit 1 where a limit is missed."""
    given = arguments_of(__doc__, rounds=15).parse_args()
    report(asyncio.run(_measure_all(given.rounds)), given)


if __name__ == "__main__":
    main()
