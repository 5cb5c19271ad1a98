"""Who takes turns: asynckv, the peer, a raw blocking socket, memcpy."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import torch

from asynckv.cli.bench.cases import pull
from asynckv.cli.bench.rig import Memory, Rig, copy_all, open_rig
from asynckv.cli.bench.settings import Settings
from benchmarks.peers.pairing import Turn
from benchmarks.peers.peer import Peer
from benchmarks.peers.source import Source, cpu_s_of
from benchmarks.peers.work import Pool, Work

__all__ = ("Contender", "Ours", "Pools", "memcpy_of", "peer_of", "raw_of")

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
    pids: tuple[int, ...] = ()
    resume: Callable[[], None] = lambda: None
    pause: Callable[[], None] = lambda: None

    async def turn(self, work: Work) -> Turn:
        """Pull ``work.repeats`` times; return the median, and the mean of CPU."""
        self.resume()
        try:
            before_s = self.cpu_s()
            calls = await self.calls(work)
            cpu_s = (self.cpu_s() - before_s) / len(calls)
        finally:
            self.pause()
        return Turn(statistics.median(calls), cpu_s)

    def cpu_s(self) -> float:
        """Return the CPU seconds of this process and of the contender's others."""
        return time.process_time() + sum(map(cpu_s_of, self.pids))


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
        cls, source: Source, settings: Settings, pools: Pools, works: Sequence[Work]
    ) -> AsyncIterator[Ours]:
        """Connect, and place an entry for each work in the other process."""
        async with open_rig(source.address, settings) as rig:
            ours = cls(rig, pools, source.pid)
            for work in works:
                if work.name != _PING:
                    await ours._place(work)
            yield ours

    @property
    def contender(self) -> Contender:
        """The one that takes turns."""
        return Contender(self._calls, (self.pid,))

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

    async def _calls(self, work: Work) -> list[float]:
        if work.name == _PING:
            return await self._ping(work)
        return [await self.pull(work) for _ in range(work.repeats)]

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


def peer_of(peer: Peer, source: Source) -> Contender:
    """Return the peer, whose source only runs in its turns if it polls."""

    async def calls(work: Work) -> list[float]:
        transfer = peer.ping if work.name == _PING else peer.pull
        found = []
        for _ in range(work.repeats):
            began_s = time.perf_counter()
            await transfer(work)
            found.append(time.perf_counter() - began_s)
        return found

    pids = (source.pid, *peer.pids)
    if peer.polls:
        return Contender(calls, pids, source.resume, source.pause)
    return Contender(calls, pids)


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

    return Contender(calls, (ours.pid,))


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
