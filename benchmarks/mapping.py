"""Hand-over of entries by shared memory, beside raw pings and memcpy in the same run.

Of an entry of 2 MiB and one of 1 GiB in 64 tensors: how long until it is there as
views, given back; until it was there and let go, acknowledged; until a byte of each
page was read; and a plain await, which copies all of it, with the digests ``edges`` and
``full``. Paired runs, each divided by its own A/A; the cold first ones are printed.

    python -m benchmarks.mapping [--runs 5] [--gib 1] [--only NAME] [--only-report]
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from asynckv.abc import KVEntry
from asynckv.cli.bench.cases import GiveBack, in_microseconds
from asynckv.cli.bench.report import Settings
from asynckv.cli.bench.rig import Rig, copy_all, make_memory
from asynckv.cli.bench.rounds import Measurement, Sample
from asynckv.cli.process import run
from benchmarks.pairing.processes import on_two_cores, own_rig
from benchmarks.pairing.runs import Figure, Runs, arguments_of, measure_runs, report

__all__ = ("main",)

_MIB = 2**20
_LAYERS = 64
_CALLS = 20
_SMALL = (1, 2 * _MIB)


class Mapped:
    """An entry of the other process, and what it costs to have it here."""

    def __init__(self, rig: Rig, parts: int, nbytes: int) -> None:
        self.rig = rig
        self.tokens = rig.new_tokens()
        self._memory = make_memory(parts, nbytes)
        self._raw, self._ping = rig.baselines.raw, [memoryview(bytearray(64))]
        self._used_cpu_s = 0.0

    async def cpu_s(self) -> float:
        """CPU seconds of this process, beside a raw stream of the other's as well."""
        return self._used_cpu_s

    async def insert(self) -> None:
        """Let the entry be there, once more."""
        layers = self._memory.layers
        await self.rig.lookup.insert(self.tokens, None, layers, None, None, ttl_s=None)

    async def hand_over(self) -> float:
        """Have the entry as views and give it back; return the seconds until then."""
        began_s = elapsed_s = time.perf_counter()
        with contextlib.suppress(GiveBack):
            async with self.rig.lookup.drop_select(self.tokens):
                elapsed_s = time.perf_counter() - began_s
                raise GiveBack
        return elapsed_s

    async def acknowledge(self) -> float:
        """Have the entry as views and let it go for good; return the seconds."""
        await self.insert()
        began_s = time.perf_counter()
        async with self.rig.lookup.drop_select(self.tokens):
            pass
        return time.perf_counter() - began_s

    async def ping(self) -> float:
        """Ping by raw sockets, which blocks; return the seconds."""
        return self._raw.pull(self._ping)

    def timing(self, call: Callable[[], Awaitable[float]]) -> Measurement:
        """Return what times some calls, each alone: the other side has settled."""

        async def measure() -> Sample:
            calls = []
            for _ in range(_CALLS):
                await asyncio.sleep(0)  # what gives the last one back is written here
                await self.ping()
                calls.append(await call())
            return in_microseconds(calls)

        return measure

    async def read(self) -> Sample:
        """Have the entry as views and read a byte of each page; give it back."""
        began_s = elapsed_s = time.perf_counter()
        with contextlib.suppress(GiveBack):
            async with self.rig.lookup.drop_select(self.tokens) as entry:
                _touch(entry)
                elapsed_s = time.perf_counter() - began_s
                raise GiveBack
        return self._sample(elapsed_s)

    async def copy(self) -> Sample:
        """Have a copy of the entry, which is inserted before."""
        await self.insert()
        before_s, began_s = time.process_time(), time.perf_counter()
        await self.rig.lookup.drop_select(self.tokens)
        elapsed_s = time.perf_counter() - began_s
        self._used_cpu_s += time.process_time() - before_s
        return self._sample(elapsed_s)

    async def memcpy(self) -> Sample:
        """Copy as much within this process."""
        views = self._memory.target_views, self._memory.source_views
        return self._sample(await self.rig.in_thread(copy_all, *views))

    async def stream(self) -> Sample:
        """Receive as much by one raw stream."""
        before_s, views = await self.rig.cpu_s(), self._memory.target_views
        elapsed_s = await self.rig.in_thread(self._raw.pull, views)
        self._used_cpu_s += await self.rig.cpu_s() - before_s
        return self._sample(elapsed_s)

    def _sample(self, elapsed_s: float) -> Sample:
        return Sample(self._memory.nbytes / elapsed_s / 1e9, self._memory.nbytes)


def _touch(entry: KVEntry) -> int:
    return sum(int(tensor.numpy()[::4096].sum()) for tensor in entry.tensors())


async def _hand_over(
    mapped: Mapped, pid: int, name: str, at_most: float | None, runs: int
) -> list[Figure]:
    await mapped.insert()
    print(f"{name}: cold hand-over {await mapped.hand_over() * 1e6:.0f} us", flush=True)
    with on_two_cores(pid):
        found = await _beside(mapped, name, mapped.hand_over, runs)
    return [Figure(f"{name} / ping", found["ping"].figure, at_most=at_most)]


async def _small(mapped: Mapped, pid: int, runs: int) -> list[Figure]:
    return await _hand_over(mapped, pid, "hand-over of 2 MiB", 3.0, runs)


async def _large(mapped: Mapped, pid: int, runs: int) -> list[Figure]:
    return await _hand_over(mapped, pid, "hand-over of the large entry", 20.0, runs)


async def _acknowledged(mapped: Mapped, pid: int, runs: int) -> list[Figure]:
    name = "2 MiB, and acknowledged"
    with on_two_cores(pid):
        found = await _beside(mapped, name, mapped.acknowledge, runs)
    return [Figure(f"{name} / ping", found["ping"].figure)]


async def _beside(
    mapped: Mapped, name: str, call: Callable[[], Awaitable[float]], runs: int
) -> Mapping[str, Runs]:
    ours, beside = mapped.timing(call), {"ping": mapped.timing(mapped.ping)}
    return await measure_runs(f"{name}, us", ours, beside, mapped.cpu_s, runs=runs)


async def _read(mapped: Mapped, pid: int, runs: int) -> list[Figure]:
    await mapped.insert()
    name, beside = "hand-over and a read a page", {"memcpy": mapped.memcpy}
    found = await measure_runs(name, mapped.read, beside, mapped.cpu_s, runs=runs)
    took = 1 / found["memcpy"].figure
    return [Figure(f"{name}: of memcpy's time", took, at_most=0.8)]


async def _edges(mapped: Mapped, pid: int, runs: int) -> list[Figure]:
    return await _plain(mapped, "plain await, edges", runs, 0.85, 3.5, 0.3)


async def _full(mapped: Mapped, pid: int, runs: int) -> list[Figure]:
    return await _plain(mapped, "plain await, full", runs, 0.6)


async def _plain(
    mapped: Mapped,
    name: str,
    runs: int,
    of_memcpy: float,
    of_raw: float | None = None,
    cpu_of_raw: float | None = None,
) -> list[Figure]:
    beside = {"memcpy": mapped.memcpy, "raw TCP": mapped.stream}
    cpu_s = mapped.cpu_s
    found = await measure_runs(f"{name}, GB/s", mapped.copy, beside, cpu_s, runs=runs)
    memcpy, raw = found["memcpy"], found["raw TCP"]
    return [
        Figure(f"{name}: speed / memcpy", memcpy.figure, at_least=of_memcpy),
        Figure(f"{name}: speed / raw TCP", raw.figure, at_least=of_raw),
        Figure(f"{name}: its CPU / raw TCP", raw.cpu_ratio, at_most=cpu_of_raw),
    ]


_CASES: Mapping[str, Callable[[Mapped, int, int], Awaitable[list[Figure]]]] = {
    "small": _small,
    "acknowledged": _acknowledged,
    "large": _large,
    "read": _read,
    "edges": _edges,
    "full": _full,
}


async def _measure_all(names: Sequence[str], runs: int, nbytes: int) -> list[Figure]:
    figures = []
    for name in names:
        settings = Settings(digest="full" if name == "full" else "auto")
        shape = (_LAYERS, nbytes // _LAYERS)
        if name in ("small", "acknowledged"):
            shape = _SMALL
        async with own_rig(settings, query="") as (rig, pid):
            figures += await _CASES[name](Mapped(rig, *shape), pid, runs)
    return figures


def main() -> None:
    """Measure, print, and exit 1 where a limit is missed."""
    given = arguments_of(__doc__, _CASES, runs=5, gib=1.0).parse_args()
    nbytes = int(given.gib * 2**30)
    report(run(_measure_all(given.only, given.runs, nbytes)), given)


if __name__ == "__main__":
    main()
