"""What benchmarks of tiers share: a tier as a store calls it, beside something bare.

All sides move as many values, and rounds alternate. What the tier moves is verified by
its digest, in threads of the rig; what stands beside it is not. How late the loop is
stands beside how late a process is at the same time that does nothing: on a busy
machine both are.
"""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Final

from asynckv.abc.tiers import StoreTier, TierMemory, TierResult, TierValue, WantedValue
from asynckv.protocol.wire import digest_of
from asynckv.testing.expectations import expect
from benchmarks.pairing.runs import Figure, ratio_of

__all__ = (
    "Batch",
    "Side",
    "TierSide",
    "Turn",
    "by_batches",
    "figures_beside",
    "lag",
    "memories_of",
    "take_turns",
)

Batch = Sequence[tuple[int, memoryview]]
"""Numbers of values, each with its memory."""
MOST_LAG_MS: Final = 10.0
_RANDOM_NBYTES: Final = 2**20

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


def memories_of(nbytes: int, count: int) -> list[memoryview]:
    """Return memory for what is under way at once, all of it touched, none alike."""
    made = [memoryview(mmap.mmap(-1, nbytes)) for _ in range(count)]
    for number, memory in enumerate(made):
        block = os.urandom(min(nbytes, _RANDOM_NBYTES))
        memory[:] = (block * (nbytes // len(block) + 1))[:nbytes]
        memory[:8] = number.to_bytes(8, "little")
    return made


@contextlib.asynccontextmanager
async def lag() -> AsyncIterator[Callable[[], float]]:
    """Yield what says, also afterwards, by how many seconds the loop was late."""
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
        yield lambda: most_s
    finally:
        ticking.cancel()
        await asyncio.wait({ticking})


class Side(abc.ABC):
    """One of those that take turns; each call moves all values."""

    @abc.abstractmethod
    async def put(self) -> None:
        """Write all of them."""

    @abc.abstractmethod
    async def get(self) -> None:
        """Read all of them."""


async def by_batches(
    count: int,
    memories: Sequence[memoryview],
    calls: int,
    call: Callable[[Batch], Awaitable[None]],
) -> None:
    """Make so many calls at a time, each with its part of the memories."""
    left, each = iter(range(count)), len(memories) // calls

    async def work(some: Sequence[memoryview]) -> None:
        while batch := list(zip(itertools.islice(left, each), some, strict=False)):
            await call(batch)

    parts = (memories[at : at + each] for at in range(0, len(memories), each))
    await asyncio.gather(*map(work, parts))


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


class TierSide(Side):
    """The tier, as a store has it: so many calls at a time of some values each."""

    def __init__(
        self,
        tier: StoreTier,
        count: int,
        memories: Sequence[memoryview],
        *,
        calls: int,
        is_verified: bool = True,
        is_anew: bool = False,
    ) -> None:
        """With ``is_anew`` each turn puts new keys, in the room of the least wanted."""
        self._tier, self._count, self._memories = tier, count, memories
        self._calls, self._is_verified, self._is_anew = calls, is_verified, is_anew
        self._pool = concurrent.futures.ThreadPoolExecutor(2)
        self._turn = 0

    async def put(self) -> None:
        self._turn += self._is_anew
        await by_batches(self._count, self._memories, self._calls, self._store)

    async def get(self) -> None:
        await by_batches(self._count, self._memories, self._calls, self._fetch)

    def _key_of(self, job: int) -> str:
        return f"k1/{self._turn}/{job}"

    async def _digests(self, batch: Batch) -> list[bytes]:
        if not self._is_verified:
            return [bytes(16)] * len(batch)
        memories = [memory for _, memory in batch]
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: list(map(digest_of, memories))
        )

    async def _store(self, batch: Batch) -> None:
        headers = await self._digests(batch)
        values = [
            TierValue(self._key_of(job), header, TierMemory(len(one), [one], [one]))
            for (job, one), header in zip(batch, headers, strict=True)
        ]
        results = set(await self._tier.store(values))
        expect(results == {TierResult.DONE}, f"stored: {results}")

    async def _fetch(self, batch: Batch) -> None:
        wanted = [_Wanted(self._key_of(job), memory) for job, memory in batch]
        results = set(await self._tier.fetch(wanted))
        expect(results == {TierResult.DONE}, f"fetched: {results}")
        digests = await self._digests(batch)
        expect(digests == [one.digest for one in wanted], "wrong bytes")


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


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one side took to move all values once, and how late loops were."""

    seconds: float
    cpu_s: float
    lag_s: float
    idle_s: float


async def take_turns(
    sides: Mapping[str, Side], rounds: int
) -> Mapping[tuple[str, str], list[Turn]]:
    """Let each put and get all values; the first round, of new memory, is not counted.

    By ``put`` or ``get`` and the side's name. The first side comes ``again`` as last.
    """
    first = next(iter(sides.values()))
    found: dict[tuple[str, str], list[Turn]] = {}
    with contextlib.closing(_Idle()) as idle:
        for number in range(rounds + 1):
            for verb in ("put", "get"):
                for name, side in (*sides.items(), ("again", first)):
                    idle.lag_s()
                    cpu_s, began_s = time.process_time(), time.perf_counter()
                    async with lag() as late_s:
                        await (side.put() if verb == "put" else side.get())
                        took_s = time.perf_counter() - began_s
                    cpu_s = time.process_time() - cpu_s
                    turn = Turn(took_s, cpu_s, late_s(), idle.lag_s())
                    if number:
                        found.setdefault((verb, name), []).append(turn)
    return found


def figures_beside(
    title: str,
    found: Mapping[tuple[str, str], Sequence[Turn]],
    nbytes: int,
    bars: Mapping[tuple[str, str], float],
) -> list[Figure]:
    """Return the tier's speed beside each other side, A/A, rate, CPU, and loop lag.

    ``bars`` are the least of the others' speed, by ``put`` or ``get`` and their names.
    """
    figures = []
    first = next(iter(found))[1]
    for verb in ("put", "get"):
        seconds = {
            name: [turn.seconds for turn in turns]
            for (what, name), turns in found.items()
            if what == verb
        }
        head, tier = f"{title} {verb}", found[verb, "tier"]
        for name in seconds:
            if name not in ("tier", "again"):
                ratio = ratio_of(seconds[name], seconds["tier"])
                bar = bars.get((verb, name))
                figures.append(Figure(f"{head}: speed / {name}", ratio, at_least=bar))
        above_s = statistics.median(one.lag_s - one.idle_s for one in tier)
        beside_s = statistics.median(one.lag_s for one in found[verb, first])
        rate = nbytes / statistics.median(seconds["tier"])
        cpu = ratio_of(
            [one.cpu_s for one in found[verb, first]], [one.cpu_s for one in tier]
        )
        lag_ms = 1e3 * above_s
        figures += [
            Figure(f"{head}: A/A", ratio_of(seconds[first], seconds["again"])),
            Figure(f"{head}: CPU of this process, {first} / the tier", cpu),
            Figure(f"{head}: MB/s", rate / 1e6),
            Figure(f"{head}: most lag above idle, ms", lag_ms, at_most=MOST_LAG_MS),
            Figure(f"{head}: most lag with {first}, ms", 1e3 * beside_s),
        ]
    return figures
