"""One run: a peer, asynckv and the baselines in turns, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import importlib.metadata
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec
import torch

from asynckv.cli.bench.settings import Settings
from asynckv.links.options import Digest
from benchmarks.peers.contenders import (
    Ours,
    Pools,
    check_once,
    memcpy_of,
    peer_of,
    raw_of,
)
from benchmarks.peers.kinds import peer_class
from benchmarks.peers.pairing import AGAIN, PEER, RAW, Turn, in_turns, lag_of, row_of
from benchmarks.peers.peer import Peer
from benchmarks.peers.report import Lag, Machine, PeerReport, Row
from benchmarks.peers.source import Source, own_process, serving_peer, serving_us
from benchmarks.peers.work import FULL, QUICK, Pool, Work

__all__ = ("Options", "run_peer")

_TICK_S: Final = 0.001
_TURNS_OF_A_TICK: Final = 4


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to measure."""

    rounds: int = 6
    lanes: int = 1
    lag_s: float = 4.0
    quick: bool = False


async def run_peer(
    name: str, options: Options, save: Callable[[PeerReport], None]
) -> PeerReport:
    """Measure one peer; ``save`` is called with what there is after each work."""
    began_s = time.monotonic()
    works = QUICK if options.quick else FULL
    kind = peer_class(name)
    os.environ.update(kind.environ)
    report = _begin(name, kind, options)
    save(report)
    async with _opened(name, kind, options, works) as run:
        for work in works:
            row = await run.row(work, options.rounds)
            report = msgspec.structs.replace(
                report,
                rows=(*report.rows, row),
                seconds=time.monotonic() - began_s,
            )
            save(report)
        report = msgspec.structs.replace(
            report,
            lags=await run.lags(works[0], options.lag_s),
            idle_cpu=await run.idle_cpu(min(1.0, options.lag_s)),
            seconds=time.monotonic() - began_s,
        )
        save(report)
    return report


class _Run:
    """Everybody who takes turns, connected."""

    def __init__(
        self, peer: Peer, source: Source, ours: Mapping[str, Ours], pools: Pools
    ) -> None:
        first = next(iter(ours.values()))
        self._peer, self._pools, self._ours = peer, pools, ours
        self._contenders = {
            **{name: one.contender for name, one in ours.items()},
            PEER: peer_of(peer, source),
            "memcpy": memcpy_of(first, pools),
        }
        raw = raw_of(first, pools)
        self._everybody = {**self._contenders, RAW: raw, AGAIN: raw}
        self._contenders[PEER].pause()

    async def row(self, work: Work, rounds: int) -> Row:
        """Measure one work, after checking the bytes and a round that is not counted.

        What fails is the row's reason.
        """
        peer = self._contenders[PEER]
        iterations: list[dict[str, Turn]] = []
        try:
            await check_once(work, self._pools, lambda: peer.turn(work))
            for number in range(rounds + 1):
                turns = {}
                for name in in_turns(list(self._contenders), number):
                    turns[name] = await self._everybody[name].turn(work)
                iterations.append(turns)
        except Exception as exc:  # noqa: BLE001 - a peer may raise anything
            reason = f"{type(exc).__name__}: {exc}"
            return Row(work.name, work.title, "failed", reason)
        return row_of(work, iterations[1:])

    async def lags(self, work: Work, seconds: float) -> dict[str, Lag]:
        """Return how late a ticker is on the idle loop, and while each pulls."""
        found = {"idle loop": lag_of(await _late(seconds, _nothing))}
        for name in (*self._ours, PEER):
            contender = self._contenders[name]
            pull = functools.partial(contender.calls, work)
            contender.resume()
            found[name] = lag_of(await _late(seconds, pull))
            contender.pause()
        return found

    async def idle_cpu(self, seconds: float) -> float:
        """Return the share of a core that the peer takes for nothing."""
        peer = self._contenders[PEER]
        peer.resume()
        before_s = peer.cpu_s()
        await asyncio.sleep(seconds)
        used_s = peer.cpu_s() - before_s
        peer.pause()
        return used_s / seconds


@contextlib.asynccontextmanager
async def _opened(
    name: str, kind: type[Peer], options: Options, works: Sequence[Work]
) -> AsyncIterator[_Run]:
    pools = Pools(Pool.source(works), Pool.target(works))
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        # Its entries are placed while the peer's process does not run yet.
        ours = {}
        for number, (title, settings) in enumerate(_settings(kind, options).items()):
            url = f"unix://{folder}/{number}" if kind.same_host else "tcp://127.0.0.1:0"
            served = functools.partial(serving_us, url, settings)
            source = await stack.enter_async_context(own_process(served))
            if not kind.same_host:  # else memory is mapped: no byte crosses a socket
                source.address += "?payload=inline"
            ours[title] = await stack.enter_async_context(
                Ours.opened(source, settings, pools, works)
            )
        served = functools.partial(serving_peer, name, works)
        source = await stack.enter_async_context(own_process(served))
        peer = kind(pools.target, works)
        await peer.connect(source.address)
        # A stopped process answers no goodbye.
        stack.push_async_callback(peer.aclose)
        stack.callback(source.resume)
        yield _Run(peer, source, ours, pools)


def _settings(kind: type[Peer], options: Options) -> dict[str, Settings]:
    digests: tuple[Digest, ...] = ("full",) if kind.is_checked else ("off", "full")
    return {
        f"asynckv {digest}": Settings(digest=digest, lanes=options.lanes)
        for digest in digests
    }


async def _late(seconds: float, pull: Callable[[], Awaitable[object]]) -> list[float]:
    lags_ms: list[float] = []

    async def tick() -> None:
        while True:
            began_s = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            lags_ms.append((time.perf_counter() - began_s - _TICK_S) * 1e3)

    ticker = asyncio.create_task(tick(), name="ticker of the benchmark")
    until_s = time.perf_counter() + seconds
    try:
        while time.perf_counter() < until_s:
            await pull()
            # After a pull that never waited, the ticker needs some turns of the loop
            # until it has woken up and looked at the clock.
            for _ in range(_TURNS_OF_A_TICK):
                await asyncio.sleep(0)
    finally:
        ticker.cancel()
        await asyncio.wait({ticker})
    return lags_ms


async def _nothing() -> None:
    await asyncio.sleep(0.1)


def _begin(name: str, kind: type[Peer], options: Options) -> PeerReport:
    path = "mapped memory" if kind.same_host else f"TCP, lanes: {options.lanes}"
    return PeerReport(
        peer=name,
        how=kind.how,
        versions={one: importlib.metadata.version(one) for one in kind.packages},
        began=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        quick=options.quick,
        machine=Machine(
            cores=len(os.sched_getaffinity(0)),
            python=sys.version.split()[0],
            torch=str(torch.__version__),
            load_before=os.getloadavg()[0],
        ),
        ours=path,
    )
