"""One run: a peer, asynckv and the baselines in turns, in this process.

Those that take turns are asynckv, the peer, a raw blocking socket, and memcpy.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec
import torch

from asynckv.cli.bench.cases import pull
from asynckv.cli.bench.report import (
    Percentiles,
    Row,
    Settings,
    Subject,
    Unit,
    percentiles_of,
)
from asynckv.cli.bench.rig import Memory, Rig, copy_all, open_rig
from asynckv.cli.bench.rounds import (
    Case,
    Measurement,
    Sample,
    measure,
    measure_between,
)
from asynckv.cli.bench.run import this_machine
from asynckv.cli.bench.server import serving
from asynckv.links.options import Digest
from benchmarks.pairing.processes import INLINE, OwnProcess, cpu_s_of, own_process
from benchmarks.peers.peer import Peer, peer_class
from benchmarks.peers.report import (
    FULL,
    MEMCPY,
    OFF,
    PEER,
    RAW,
    PeerReport,
    rows_of,
)
from benchmarks.peers.work import QUICK, WORKS, Pool, Work

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
    works = QUICK if options.quick else WORKS
    kind = peer_class(name)
    os.environ.update(kind.environ)
    report = _begin(name, kind, options)
    save(report)
    async with _opened(name, kind, options, works) as run:
        for work in works:
            rows = await run.rows(work, options.rounds)
            report = msgspec.structs.replace(
                report,
                rows=(*report.rows, rows),
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
        self, peer: Peer, source: OwnProcess, ours: Mapping[str, Ours], pools: Pools
    ) -> None:
        self._pools = pools
        self._pids = (source.pid, *peer.pids, *(one.pid for one in ours.values()))
        self._contenders = {
            RAW: raw_of(ours[OFF], pools),
            PEER: peer_of(peer, source),
            FULL: Contender(ours[FULL].calls),
            MEMCPY: memcpy_of(ours[OFF], pools),
            OFF: Contender(ours[OFF].calls),
        }
        self._contenders[PEER].pause()

    async def cpu_s(self) -> float:
        """Return the CPU seconds of all processes: those that wait use none."""
        return time.process_time() + sum(map(cpu_s_of, self._pids))

    async def rows(self, work: Work, rounds: int) -> Mapping[str, Row]:
        """Measure one work, after checking the bytes and a round that is not counted.

        What fails is the row's reason.
        """
        unit: Unit = "us" if work.name == _PING else "GB/s"
        subject = Subject(
            *(work.name, work.title, "throughput", unit, unit != "us", work.nbytes),
            parts=work.parts,
        )
        beside = {name: one.measuring(work) for name, one in self._contenders.items()}
        ours = beside.pop(OFF)
        case = Case(lambda: measure_between(ours, beside, self.cpu_s))
        try:
            await check_once(work, self._pools, beside[PEER])
            found = await measure(case, rounds, lambda _: None)
        except Exception as exc:  # noqa: BLE001 - a peer may raise anything
            reason = f"{type(exc).__name__}: {exc}"
            return {OFF: Row(subject, "failed", reason=reason)}
        return rows_of(subject, found)

    async def lags(self, work: Work, seconds: float) -> dict[str, Percentiles]:
        """Return how late a ticker is on the idle loop, and while each pulls."""
        found = {"idle loop": percentiles_of(await _late(seconds, _nothing))}
        for name in (OFF, FULL, PEER):
            contender = self._contenders[name]
            contender.resume()
            pull = functools.partial(contender.calls, work)
            found[name] = percentiles_of(await _late(seconds, pull))
            contender.pause()
        return found

    async def idle_cpu(self, seconds: float) -> float:
        """Return the share of a core that the peer takes for nothing."""
        peer = self._contenders[PEER]
        peer.resume()
        before_s = await self.cpu_s()
        await asyncio.sleep(seconds)
        used_s = await self.cpu_s() - before_s
        peer.pause()
        return used_s / seconds


@contextlib.asynccontextmanager
async def _serving_peer(name: str, works: Sequence[Work]) -> AsyncIterator[str]:
    """Serve a peer with a pool of its own."""
    kind = peer_class(name)
    os.environ.update(kind.environ)
    peer = kind(Pool.source(works), works)
    try:
        yield await peer.serve()
    finally:
        await peer.aclose()


@contextlib.asynccontextmanager
async def _opened(
    name: str, kind: type[Peer], options: Options, works: Sequence[Work]
) -> AsyncIterator[_Run]:
    pools = Pools(Pool.source(works), Pool.target(works))
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        # Its entries are placed while the peer's process does not run yet.
        ours = {}
        digests: Mapping[str, Digest] = {OFF: "off", FULL: "full"}
        for name_of_ours, digest in digests.items():
            settings = Settings(digest=digest, lanes=options.lanes)
            url = f"unix://{folder}/{digest}"
            if not kind.same_host:
                url = "tcp://127.0.0.1:0"
            served = functools.partial(serving, url, settings)
            source = await stack.enter_async_context(own_process(served))
            if not kind.same_host:  # else memory is mapped: no byte crosses a socket
                source.address += INLINE
            ours[name_of_ours] = await stack.enter_async_context(
                Ours.opened(source, settings, pools, works)
            )
        served = functools.partial(_serving_peer, name, works)
        source = await stack.enter_async_context(own_process(served))
        peer = kind(pools.target, works)
        await peer.connect(source.address)
        # A stopped process answers no goodbye.
        stack.push_async_callback(peer.aclose)
        stack.callback(source.resume)
        yield _Run(peer, source, ours, pools)


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
        machine=this_machine(),
        ours=path,
    )


_PING = "ping"
_PING_NBYTES = 64
_JOINED_BELOW = 64 * 2**10


@dataclasses.dataclass(frozen=True)
class Pools:
    """What is sent, to compare with, and where everybody's payload lands."""

    source: Pool
    target: Pool


@dataclasses.dataclass(frozen=True)
class Contender:
    """One that takes turns. ``calls`` pulls a work and returns seconds a pull."""

    calls: Callable[[Work], Awaitable[Sequence[float]]]
    resume: Callable[[], None] = lambda: None
    pause: Callable[[], None] = lambda: None

    def measuring(self, work: Work) -> Measurement:
        """Return what pulls ``work.repeats`` times, and counts the median of them."""

        async def measure() -> Sample:
            self.resume()
            try:
                calls = await self.calls(work)
            finally:
                self.pause()
            elapsed_s = statistics.median(calls)
            if work.name == _PING:
                return Sample(elapsed_s * 1e6)
            return Sample(work.total / elapsed_s / 1e9, work.total * len(calls))

        return measure


class Ours:
    """asynckv with one setting. Made by :meth:`opened`."""

    def __init__(self, rig: Rig, pools: Pools, pid: int) -> None:
        self.rig = rig
        self.pid = pid
        self._pools = pools
        self._placed: dict[str, tuple[list[int], Memory]] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(
        cls, source: OwnProcess, settings: Settings, pools: Pools, works: Sequence[Work]
    ) -> AsyncIterator[Ours]:
        """Connect, and place an entry for each work in the other process."""
        async with open_rig(source.address, settings) as rig:
            ours = cls(rig, pools, source.pid)
            for work in works:
                if work.name != _PING:
                    await ours._place(work)
            yield ours

    async def calls(self, work: Work) -> list[float]:
        """Return the seconds of each pull, or of each ping."""
        if work.name == _PING:
            return await self._ping(work)
        return [await self.pull(work) for _ in range(work.repeats)]

    async def pull(self, work: Work) -> float:
        """Select the work's entry into the target pool; return the seconds."""
        tokens, memory = self._placed[work.name]
        elapsed_s = await pull(self.rig.lookup, tokens, memory)
        if _is_joined(work):
            began_s = time.perf_counter()
            [piece] = self._pools.target.pieces(work, work.total)
            await self.rig.in_thread(piece.land, memory.targets[0].numpy())
            elapsed_s += time.perf_counter() - began_s
        return elapsed_s

    async def _place(self, work: Work) -> None:
        sources, targets = (_tensors(pool, work) for pool in self._both_pools())
        memory = Memory(sources, targets)
        if _is_joined(work):
            [piece] = self._pools.source.pieces(work, work.total)
            joined = torch.from_numpy(piece.gather())
            memory = Memory([joined], [torch.zeros_like(joined)])
        tokens = self.rig.new_tokens()
        layers = memory.layers
        await self.rig.lookup.insert(tokens, None, layers, None, None, ttl_s=None)
        self._placed[work.name] = tokens, memory
        await check_once(work, self._pools, lambda: self.pull(work))

    def _both_pools(self) -> tuple[Pool, Pool]:
        return self._pools.source, self._pools.target

    async def _ping(self, work: Work) -> list[float]:
        tensor = torch.zeros(work.nbytes, dtype=torch.uint8)
        tokens = self.rig.new_tokens()
        for _ in range(work.repeats):
            await self.rig.lookup.insert(tokens, None, tensor, None, None)
        calls = []
        for _ in range(work.repeats):
            began_s = time.perf_counter()
            await self.rig.lookup.drop_select(tokens)
            calls.append(time.perf_counter() - began_s)
        return calls


async def check_once(
    work: Work, pools: Pools, transfer: Callable[[], Awaitable[object]]
) -> None:
    """Poison the target, transfer, and compare every byte.

    :raises WrongBytes: they differ
    """
    pools.target.poison()
    await transfer()
    pools.target.check(work, pools.source)


def peer_of(peer: Peer, source: OwnProcess) -> Contender:
    """Return the peer, whose source only runs in its turns if it polls."""

    async def calls(work: Work) -> list[float]:
        transfer = peer.ping if work.name == _PING else peer.pull
        found = []
        for _ in range(work.repeats):
            began_s = time.perf_counter()
            await transfer(work)
            found.append(time.perf_counter() - began_s)
        return found

    if peer.polls:
        return Contender(calls, source.resume, source.pause)
    return Contender(calls)


def raw_of(ours: Ours, pools: Pools) -> Contender:
    """Return one raw stream to the process that serves asynckv."""
    rig, raw = ours.rig, ours.rig.baselines.raw

    def ping(times: int) -> list[float]:
        target = [memoryview(bytearray(_PING_NBYTES))]
        return [raw.pull(target) for _ in range(times)]

    async def calls(work: Work) -> list[float]:
        if work.name == _PING:
            return await rig.in_thread(ping, work.repeats)
        views = pools.target.views(work)
        return [await rig.in_thread(raw.pull, views) for _ in range(work.repeats)]

    return Contender(calls)


def memcpy_of(ours: Ours, pools: Pools) -> Contender:
    """Return a copy from one pool of this process to the other, part by part."""

    async def calls(work: Work) -> list[float]:
        targets, sources = pools.target.views(work), pools.source.views(work)
        in_thread = ours.rig.in_thread
        return [
            await in_thread(copy_all, targets, sources) for _ in range(work.repeats)
        ]

    return Contender(calls)


def _is_joined(work: Work) -> bool:
    """Whether its parts travel as one tensor, and are put into their places then.

    That is what the peers do with small blocks, and it is faster than many tensors.
    """
    return work.parts > 1 and work.nbytes < _JOINED_BELOW


def _tensors(pool: Pool, work: Work) -> list[torch.Tensor]:
    return [torch.from_numpy(row) for row in pool.rows(work)]
