"""Small things over one TCP link beside their baselines, in one run, over loopback.

10,000 blocks of 4 KiB from random places of one pool to random places of another, in
one entry of key and value, beside raw blocking sockets that send and receive them one
by one; 64 bytes by ``drop_select``, by ``insert`` and ``drop_select``, and there and
back by a pipe, in turns of ten with a bare asyncio echo; 100 requests of 16 KiB
outstanding beside bare asyncio streams, and 1,000 beside our own 100. Paired runs, each
divided by its own A/A.

``mapped-blocks`` is the first one by mapped memory.

    python -m benchmarks.small [--runs 5] [--only NAME ...] [--only-report]
        [--loop asyncio]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

import torch

import asynckv
from asynckv.cli.bench.cases import ask, open_outstanding, open_ping
from asynckv.cli.bench.report import Subject
from asynckv.cli.bench.rig import Rig, open_rig
from asynckv.cli.bench.rounds import Case, Sample, measure_in_turns
from asynckv.cli.bench.settings import Settings
from asynckv.cli.process import LoopName, run
from asynckv.tensors.views import bytes_of
from benchmarks.pairing.cores import on_two_cores
from benchmarks.pairing.runs import (
    Figure,
    Runs,
    measure_case,
    measure_runs,
    report,
)
from benchmarks.pairing.serving import Places, serving

__all__ = ("main",)

_BLOCKS, _BLOCK_NBYTES = 10_000, 4096
_PING_NBYTES, _REQUEST_NBYTES = 64, 16 * 1024
_PINGS, _REQUESTS = 1000, 4000


class _GiveBack(Exception):
    """Leaves ``async with drop_select()`` so that the entry stays."""


async def _blocks(rig: Rig, places: Places, runs: int) -> list[Figure]:
    found = await _batches("4 KiB blocks", rig, runs)
    batched = "4 KiB blocks batched / raw one by one"
    return [
        Figure(batched, found.figure, at_least=2.5),
        Figure("4 KiB blocks CPU a byte / raw one by one", found.cpu_ratio),
    ]


async def _mapped_blocks(rig: Rig, places: Places, runs: int) -> list[Figure]:
    found = await _batches("4 KiB blocks, mapped", rig, runs)
    return [Figure("4 KiB blocks batched, mapped / raw one by one", found.figure)]


async def _batches(title: str, rig: Rig, runs: int) -> Runs:
    """The wall time of a batch contains the making of both lists of blocks."""
    shape, chosen = (2 * _BLOCKS, _BLOCK_NBYTES), random.Random(0)
    here, there = (torch.zeros(shape, dtype=torch.uint8) for _ in range(2))
    here.random_(0, 256)
    ids, places = (chosen.sample(range(2 * _BLOCKS), _BLOCKS) for _ in range(2))
    tokens = rig.new_tokens()
    half = _BLOCKS // 2
    key, value = (asynckv.KVBlocks(here, some) for some in (ids[:half], ids[half:]))
    await rig.lookup.insert(tokens, None, key, value, None)
    views = [bytes_of(there[place]) for place in places]

    async def ours() -> Sample:
        began_s = time.perf_counter()
        into = {
            "key": asynckv.KVBlocks(there, places[:half]),
            "value": asynckv.KVBlocks(there, places[half:]),
        }
        with contextlib.suppress(_GiveBack):
            async with rig.lookup.drop_select(tokens, into=into):
                elapsed_s = time.perf_counter() - began_s
                raise _GiveBack
        return Sample(_BLOCKS / elapsed_s, here.nbytes // 2)

    async def raw() -> Sample:
        elapsed_s = await rig.in_thread(rig.baselines.raw.pull, views)
        return Sample(_BLOCKS / elapsed_s, here.nbytes // 2)

    await ours()
    if not torch.equal(there[places], here[ids]):
        raise SystemExit("wrong bytes in some block")
    return await measure_runs(f"{title}, a second", ours, raw, rig.cpu_s, runs=runs)


async def _ping(rig: Rig, places: Places, runs: int) -> list[Figure]:
    subject = Subject("ping", "ping", "latency", "us", False, _PING_NBYTES)
    async with open_ping(rig, subject, _PINGS) as case:
        with on_two_cores(places.pid):
            title = "64-byte drop_select, us"
            found = await measure_case(title, case, runs=runs)
    return [Figure("64-byte drop_select p50 / echo", found.figure, at_most=1.25)]


async def _pairs(rig: Rig, places: Places, runs: int) -> list[Figure]:
    tensor = torch.zeros(_PING_NBYTES, dtype=torch.uint8)
    tokens = rig.new_tokens()

    async def pair() -> None:
        await rig.lookup.insert(tokens, None, tensor, None, None)
        await rig.lookup.drop_select(tokens)

    async def echoes() -> None:
        for _ in range(2):
            await rig.baselines.echo.ping(bytes(_PING_NBYTES))

    with on_two_cores(places.pid):
        title = "64-byte insert and drop_select, us"
        found = await _in_turns(title, rig, pair, echoes, runs)
    at_most = _ON[_loop_name()][0]
    return [Figure("64-byte pair p50 / two echoes", found.figure, at_most=at_most)]


async def _pipe(rig: Rig, places: Places, runs: int) -> list[Figure]:
    tensor = torch.zeros(_PING_NBYTES, dtype=torch.uint8)
    async with asynckv.open_pipe(places.pipe) as pipe:

        async def there_and_back() -> None:
            await pipe.send_tensor(tensor)
            await pipe.recv_tensor()

        async def echo() -> None:
            await rig.baselines.echo.ping(bytes(_PING_NBYTES))

        with on_two_cores(places.pid):
            title = "64 bytes there and back by a pipe, us"
            found = await _in_turns(title, rig, there_and_back, echo, runs)
    at_most = _ON[_loop_name()][1]
    return [Figure("64-byte pipe p50 / echo", found.figure, at_most=at_most)]


_ON = {"asyncio": (1.3, 1.4), "uvloop": (1.35, 1.65)}
"""Limits of a pair and of a pipe, on that loop."""


def _loop_name() -> str:
    module = type(asyncio.get_running_loop()).__module__
    return "uvloop" if module.startswith("uvloop") else "asyncio"


async def _in_turns(
    title: str,
    rig: Rig,
    ours: Callable[[], Awaitable[None]],
    bare: Callable[[], Awaitable[None]],
    runs: int,
) -> Runs:
    def sample(calls: Sequence[float]) -> Sample:
        return Sample(statistics.median(calls) * 1e6)

    case = Case(lambda: measure_in_turns(_PINGS, ours, {"echo": bare}, sample))
    return await measure_case(title, case, runs=runs)


def _asking(outstanding: int) -> Subject:
    return Subject(
        f"outstanding-{outstanding}",
        "requests",
        "concurrency",
        "requests/s",
        True,
        _REQUEST_NBYTES,
        outstanding=outstanding,
    )


async def _outstanding(rig: Rig, places: Places, runs: int) -> list[Figure]:
    async with open_outstanding(rig, _asking(100), _REQUESTS) as case:
        with on_two_cores(places.pid):
            title = "100 outstanding, requests/s"
            found = await measure_case(title, case, runs=runs)
    what = "100 outstanding 16 KiB / bare streams"
    return [Figure(what, found.figure, at_least=0.5)]


async def _crowd(rig: Rig, places: Places, runs: int) -> list[Figure]:
    many, some = (partial(ask, rig, _asking(n), _REQUESTS) for n in (1000, 100))
    with on_two_cores(places.pid):
        title = "1,000 outstanding, requests/s"
        found = await measure_runs(title, many, some, rig.cpu_s, runs=runs)
    return [Figure("1,000 outstanding / our 100", found.figure, at_least=0.6)]


_CASES: dict[str, Callable[[Rig, Places, int], Awaitable[list[Figure]]]] = {
    "blocks": _blocks,
    "mapped-blocks": _mapped_blocks,
    "ping": _ping,
    "pairs": _pairs,
    "pipe": _pipe,
    "outstanding": _outstanding,
    "crowd": _crowd,
}


@contextlib.asynccontextmanager
async def _open(url: str) -> AsyncIterator[Rig]:
    async with open_rig(url, Settings()) as rig:
        yield rig


async def _measure_all(names: list[str], runs: int, loop: LoopName) -> list[Figure]:
    figures: list[Figure] = []
    with serving(large=False, loop=loop) as places:
        for name in names:
            url = places.tcp
            if name.startswith("mapped"):
                url = url.partition("?")[0]  # as peers of one host choose by themselves
            async with _open(url) as rig:
                figures += await _CASES[name](rig, places, runs)
    return figures


def main() -> None:
    """Measure, print, and exit 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=_CASES, default=list(_CASES))
    parser.add_argument("--only-report", action="store_true")
    loops: tuple[LoopName, ...] = ("auto", "asyncio", "uvloop")
    parser.add_argument("--loop", choices=loops, default="auto")
    given = parser.parse_args()
    measuring = _measure_all(given.only, given.runs, given.loop)
    figures = run(measuring, given.loop)
    report(figures, only_report=given.only_report)


if __name__ == "__main__":
    main()
