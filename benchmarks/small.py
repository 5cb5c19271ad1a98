"""Small things over one TCP link beside their baselines, in one run, over loopback.

10,000 blocks of 4 KiB from random places of one pool to random places of another, in
one entry of key and value, beside raw blocking sockets that send and receive them one
by one; 64 bytes by ``drop_select``, by ``insert`` and ``drop_select``, and there and
back by a pipe, in turns of ten with a bare asyncio echo, the first one with a raw
blocking ping as well; 100 requests of 16 KiB outstanding beside bare asyncio streams,
and 1,000 beside our own 100. Paired runs, each divided by its own A/A.

``mapped-blocks`` is the first one by mapped memory.

    python -m benchmarks.small [--runs 5] [--only NAME ...] [--only-report]
        [--loop asyncio]
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import torch

import asynckv
from asynckv.cli.bench.cases import (
    GiveBack,
    ask,
    in_microseconds,
    open_outstanding,
    open_ping,
)
from asynckv.cli.bench.report import Settings, Subject
from asynckv.cli.bench.rig import Rig
from asynckv.cli.bench.rounds import Case, Round, Sample, measure_in_turns
from asynckv.cli.process import LoopName, run
from asynckv.pipes.endpoints import PipeListener
from asynckv.tensors.views import bytes_of
from benchmarks.pairing.processes import INLINE, on_two_cores, own_process, own_rig
from benchmarks.pairing.runs import (
    Figure,
    Runs,
    arguments_of,
    measure_case,
    measure_runs,
    report,
)

__all__ = ("main",)

_BLOCKS, _BLOCK_NBYTES = 10_000, 4096
_PING_NBYTES, _REQUEST_NBYTES = 64, 16 * 1024
_PINGS, _REQUESTS = 1000, 4000
_PAIR_AT_MOST = {"asyncio": 1.3, "uvloop": 1.35}
_PIPE_AT_MOST = {"asyncio": 1.4, "uvloop": 1.65}
"""By the loop that both sides run on."""


async def _blocks(rig: Rig, pid: int, runs: int) -> list[Figure]:
    found = await _batches("4 KiB blocks", rig, runs)
    batched = "4 KiB blocks batched / raw one by one"
    return [
        Figure(batched, found.figure, at_least=2.5),
        Figure("4 KiB blocks CPU a byte / raw one by one", found.cpu_ratio),
    ]


async def _mapped_blocks(rig: Rig, pid: int, runs: int) -> list[Figure]:
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
        with contextlib.suppress(GiveBack):
            async with rig.lookup.drop_select(tokens, into=into):
                elapsed_s = time.perf_counter() - began_s
                raise GiveBack
        return Sample(_BLOCKS / elapsed_s, here.nbytes // 2)

    async def raw() -> Sample:
        elapsed_s = await rig.in_thread(rig.baselines.raw.pull, views)
        return Sample(_BLOCKS / elapsed_s, here.nbytes // 2)

    await ours()
    if not torch.equal(there[places], here[ids]):
        raise SystemExit("wrong bytes in some block")
    beside, what = {"raw one by one": raw}, f"{title}, a second"
    return _only(await measure_runs(what, ours, beside, rig.cpu_s, runs=runs))


def _only(found: Mapping[str, Runs]) -> Runs:
    [runs] = found.values()
    return runs


async def _ping(rig: Rig, pid: int, runs: int) -> list[Figure]:
    subject = Subject("ping", "ping", "latency", "us", False, _PING_NBYTES)
    async with open_ping(rig, subject, _PINGS) as case:
        with on_two_cores(pid):
            found = await measure_case("64-byte drop_select, us", case, runs=runs)
    what = "64-byte drop_select p50 / echo"
    return [Figure(what, _only(found).figure, at_most=1.25)]


async def _raw_ping(rig: Rig, pid: int, runs: int) -> list[Figure]:
    tensor = torch.zeros(_PING_NBYTES, dtype=torch.uint8)
    tokens, target = rig.new_tokens(), [memoryview(bytearray(_PING_NBYTES))]

    async def raw() -> None:
        rig.baselines.raw.pull(target)  # blocks, as whoever has nothing else to do

    async def select() -> None:
        await rig.lookup.drop_select(tokens)

    async def measure_round() -> Round:
        for _ in range(_PINGS):
            await rig.lookup.insert(tokens, None, tensor, None, None)
        return await measure_in_turns(_PINGS, select, {"raw": raw}, in_microseconds)

    with on_two_cores(pid):
        title = "64-byte drop_select, us"
        found = await measure_case(title, Case(measure_round), runs=runs)
    what = "64-byte drop_select p50 / raw ping"
    return [Figure(what, _only(found).figure, at_most=3.0)]


async def _pairs(rig: Rig, pid: int, runs: int) -> list[Figure]:
    tensor = torch.zeros(_PING_NBYTES, dtype=torch.uint8)
    tokens = rig.new_tokens()

    async def pair() -> None:
        await rig.lookup.insert(tokens, None, tensor, None, None)
        await rig.lookup.drop_select(tokens)

    async def echoes() -> None:
        for _ in range(2):
            await rig.baselines.echo.ping(bytes(_PING_NBYTES))

    with on_two_cores(pid):
        title = "64-byte insert and drop_select, us"
        found = await _in_turns(title, pair, echoes, runs)
    what, at_most = "64-byte pair p50 / two echoes", _PAIR_AT_MOST[_loop_name()]
    return [Figure(what, found.figure, at_most=at_most)]


async def _pipe(rig: Rig, pid: int, runs: int) -> list[Figure]:
    tensor = torch.zeros(_PING_NBYTES, dtype=torch.uint8)

    async def there_and_back() -> None:
        await pipe.send_tensor(tensor)
        await pipe.recv_tensor()

    async def echo() -> None:
        await rig.baselines.echo.ping(bytes(_PING_NBYTES))

    loop: LoopName = _loop_name()
    async with own_process(_echoing, loop) as there:
        async with asynckv.open_pipe(there.address) as pipe:
            with on_two_cores(pid, there.pid):
                title = "64 bytes there and back by a pipe, us"
                found = await _in_turns(title, there_and_back, echo, runs)
    what, at_most = "64-byte pipe p50 / echo", _PIPE_AT_MOST[loop]
    return [Figure(what, found.figure, at_most=at_most)]


@contextlib.asynccontextmanager
async def _echoing() -> AsyncIterator[str]:
    """In another process: send back what comes by a pipe."""
    async with asynckv.listen_pipe(f"tcp://127.0.0.1:0{INLINE}") as listener:
        echoing = asyncio.create_task(_echo(listener))
        yield listener.url
        echoing.cancel()
        await asyncio.wait({echoing})


async def _echo(listener: PipeListener) -> None:
    async with await listener.accept() as pipe:
        with contextlib.suppress(asynckv.PeerLost):
            async for tensor in pipe:
                await pipe.send_tensor(tensor)


def _loop_name() -> Literal["asyncio", "uvloop"]:
    module = type(asyncio.get_running_loop()).__module__
    return "uvloop" if module.startswith("uvloop") else "asyncio"


async def _in_turns(
    title: str,
    ours: Callable[[], Awaitable[None]],
    bare: Callable[[], Awaitable[None]],
    runs: int,
) -> Runs:
    beside = {"bare asyncio echo": bare}
    case = Case(lambda: measure_in_turns(_PINGS, ours, beside, in_microseconds))
    return _only(await measure_case(title, case, runs=runs))


def _asking(outstanding: int) -> Subject:
    return Subject(
        f"outstanding-{outstanding}",
        *("requests", "concurrency", "requests/s", True, _REQUEST_NBYTES),
        outstanding=outstanding,
    )


async def _outstanding(rig: Rig, pid: int, runs: int) -> list[Figure]:
    async with open_outstanding(rig, _asking(100), _REQUESTS) as case:
        with on_two_cores(pid):
            found = await measure_case("100 outstanding, requests/s", case, runs=runs)
    what = "100 outstanding 16 KiB / bare streams"
    return [Figure(what, _only(found).figure, at_least=0.5)]


async def _crowd(rig: Rig, pid: int, runs: int) -> list[Figure]:
    many, some = (partial(ask, rig, _asking(n), _REQUESTS) for n in (1000, 100))
    with on_two_cores(pid):
        title, beside = "1,000 outstanding, requests/s", {"our 100": some}
        found = await measure_runs(title, many, beside, rig.cpu_s, runs=runs)
    return [Figure("1,000 outstanding / our 100", _only(found).figure, at_least=0.6)]


_CASES: Mapping[str, Callable[[Rig, int, int], Awaitable[list[Figure]]]] = {
    "blocks": _blocks,
    "mapped-blocks": _mapped_blocks,
    "ping": _ping,
    "raw-ping": _raw_ping,
    "pairs": _pairs,
    "pipe": _pipe,
    "outstanding": _outstanding,
    "crowd": _crowd,
}


async def _measure_all(names: Sequence[str], runs: int, loop: LoopName) -> list[Figure]:
    figures: list[Figure] = []
    for name in names:
        query = "" if name.startswith("mapped") else INLINE
        async with own_rig(Settings(loop=loop), query=query) as (rig, pid):
            figures += await _CASES[name](rig, pid, runs)
    return figures


def main() -> None:
    """Measure, print, and exit 1 where a limit is missed."""
    parser = arguments_of(__doc__, _CASES, runs=5)
    loops: tuple[LoopName, ...] = ("auto", "asyncio", "uvloop")
    parser.add_argument("--loop", choices=loops, default="auto")
    given = parser.parse_args()
    report(run(_measure_all(given.only, given.runs, given.loop), given.loop), given)


if __name__ == "__main__":
    main()
