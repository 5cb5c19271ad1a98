"""The disk tier beside bare threads on the same disk, in one run.

Four threads on either side. The tier is called with eight values at a time, and while
these are verified with eight others; ``--unverified`` leaves digests out. All of it is
by direct I/O, so every read is cold. A ratio is the median of those of each round, and
the A/A is of the raw threads with themselves.

Then a scan beside bare ``pread``s of the same pages by as many threads, and what the
index of two million slots takes.

    python -m benchmarks.disk_tier [--rounds 5] [--folder /var/tmp] [--only 2MiB]
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import mmap
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy

from asynckv.abc.tiers import TierMemory, TierValue
from asynckv.stores.disk import DiskTier
from asynckv.stores.disk.calls import FileCalls
from asynckv.stores.disk.index import SlotIndex
from asynckv.stores.disk.segments import Segment
from asynckv.stores.disk.slots import FoundSlots
from asynckv.testing.expectations import expect
from benchmarks.pairing.runs import Figure, arguments_of, figures_of, report
from benchmarks.pairing.tiers import (
    Side,
    TierSide,
    figures_beside,
    memories_of,
    take_turns,
)

__all__ = ("main",)

_PAGE = 4096
_PIECE = 2**20
_AT_ONCE = 8
_CALLS = 2
_THREADS = 4
_LEAST_TOTAL, _LEAST_VALUES = 256 * 2**20, 64
_SIZES = {"256KiB": 256 * 1024, "2MiB": 2 * 2**20, "16MiB": 16 * 2**20}
_BARS = {
    "2MiB": {("get", "raw"): 0.9, ("put", "raw"): 0.9},
    "16MiB": {("get", "raw"): 0.9, ("put", "raw"): 0.9},
    "256KiB": {("get", "files"): 0.6, ("put", "files"): 1.5},
}


def _by_threads(jobs: int, work: Callable[[int, int], None]) -> float:
    """Run ``work(job, worker)`` by as many threads as the tier has; return seconds."""
    left = iter(range(jobs))
    lock = threading.Lock()

    def run(worker: int) -> None:
        while True:
            with lock:
                job = next(left, None)
            if job is None:
                return
            work(job, worker)

    began = time.perf_counter()
    threads = [threading.Thread(target=run, args=(k,)) for k in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


_Call = Callable[[int, Sequence[memoryview], int], int]


def _move(call: _Call, fd: int, memory: memoryview, at: int) -> None:
    done = 0
    while done < len(memory):
        done += call(fd, [memory[done : done + _PIECE]], at + done)


class _Raw(Side):
    """One preallocated file, by direct I/O, in pieces of 1 MiB."""

    def __init__(
        self, folder: Path, count: int, memories: Sequence[memoryview]
    ) -> None:
        self._count, self._memories = count, memories
        self._fd = FileCalls().open(str(folder / "raw"), is_direct=True)
        os.posix_fallocate(self._fd, 0, count * len(memories[0]))

    async def put(self) -> None:
        await asyncio.to_thread(self._run, os.pwritev)

    async def get(self) -> None:
        await asyncio.to_thread(self._run, os.preadv)

    def close(self) -> None:
        os.close(self._fd)

    def _run(self, call: _Call) -> None:
        def work(job: int, worker: int) -> None:
            memory = self._memories[worker]
            _move(call, self._fd, memory, job * len(memory))

        _by_threads(self._count, work)


class _Files(Side):
    """A file a value, by direct I/O, renamed when it is written."""

    def __init__(
        self, folder: Path, count: int, memories: Sequence[memoryview]
    ) -> None:
        self._count, self._memories = count, memories
        self._folder = folder / "files"
        self._folder.mkdir()

    async def put(self) -> None:
        def work(job: int, worker: int) -> None:
            path = f"{self._folder}/{job}"
            fd = FileCalls().open(f"{path}.tmp", is_direct=True)
            _move(os.pwritev, fd, self._memories[worker], 0)
            os.close(fd)
            os.rename(f"{path}.tmp", path)

        await asyncio.to_thread(_by_threads, self._count, work)

    async def get(self) -> None:
        def work(job: int, worker: int) -> None:
            fd = FileCalls().open(f"{self._folder}/{job}", is_direct=True)
            _move(os.preadv, fd, self._memories[worker], 0)
            os.close(fd)

        await asyncio.to_thread(_by_threads, self._count, work)


async def _measure(
    folder: Path, name: str, rounds: int, *, is_verified: bool
) -> list[Figure]:
    nbytes = _SIZES[name]
    count = max(_LEAST_TOTAL // nbytes, _LEAST_VALUES)
    memories = memories_of(nbytes, _CALLS * _AT_ONCE)
    raw = _Raw(folder, count, memories)
    async with DiskTier(folder / "kv", 2 * count * nbytes) as opened:
        await opened.probe()
        tier = TierSide(
            *(opened, count, memories),
            calls=_CALLS,
            is_verified=is_verified,
            is_anew=True,
        )
        sides = {"raw": raw, "tier": tier, "files": _Files(folder, count, memories)}
        found = await take_turns(sides, rounds)
    raw.close()
    return figures_beside(name, found, count * nbytes, _BARS[name])


_SCANNED = 20_000


async def _scan(folder: Path, rounds: int) -> list[Figure]:
    page = memoryview(mmap.mmap(-1, _PAGE))
    path = folder / "kv"
    async with DiskTier(path, 2 * 2**30) as tier:
        await tier.probe()
        for start in range(0, _SCANNED, 100):
            values = [
                TierValue(f"k1/{at:0100}", b"." * 300, TierMemory(1, [page[:1]]))
                for at in range(start, start + 100)
            ]
            await tier.store(values)
    ratios, again = [], []
    for _ in range(rounds):
        bare = _bare_scan(path)
        began = time.perf_counter()
        async with DiskTier(path, 2 * 2**30) as tier:
            await tier.probe()
            await tier.scanned()
            seconds = time.perf_counter() - began
            expect(len(await tier.contains(["k1/0"])) == 1, "it answers")
            slots = tier.statistics().slots
            expect(tier.statistics().keys == _SCANNED, "all were found")
        ratios.append(seconds / bare)
        again.append(_bare_scan(path) / bare)
    return [
        Figure(
            f"scan of {slots} slots: time / bare preads",
            statistics.median(ratios),
            at_most=1.2,
        ),
        *figures_of(
            "scan", {"A/A": statistics.median(again), "slots a second": slots / seconds}
        ),
    ]


def _bare_scan(path: Path) -> float:
    pages = [memoryview(mmap.mmap(-1, _PAGE)) for _ in range(_THREADS)]
    places = []
    for file in sorted(path.glob("*.slots")):
        fd = FileCalls().open(str(file), is_direct=True)
        slot = _PAGE * int(file.stem.partition("-")[2])
        places += [(fd, at) for at in range(0, file.stat().st_size, slot)]
    chunks = (
        list(itertools.batched(places, 128))
        if hasattr(itertools, "batched")
        else [places[at : at + 128] for at in range(0, len(places), 128)]
    )

    def work(job: int, worker: int) -> None:
        for fd, at in chunks[job]:
            os.preadv(fd, [pages[worker]], at)

    seconds = _by_threads(len(chunks), work)
    for fd in {fd for fd, _ in places}:
        os.close(fd)
    return seconds


def _index() -> list[Figure]:
    """Two million slots in 128 files, found as a scan finds them."""
    before = _rss()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        index = SlotIndex(lambda work: _forget(pool.submit(work)))
        return _fill_index(index, before)


def _forget(begun: concurrent.futures.Future[None]) -> None:
    """Nobody waits for it."""


def _fill_index(index: SlotIndex, before: int) -> list[Figure]:
    each = 2_000_000 // 128
    rng = numpy.random.default_rng(0)
    slowest = 0.0
    for number in range(128):
        index.add_segment(Segment(number, 17, each), is_free=False)
        for start in range(0, each, 256):
            slots = numpy.arange(start, min(start + 256, each))
            low, high = rng.integers(0, 2**63, (2, len(slots)), numpy.uint64)
            found = FoundSlots(
                slots,
                low,
                high,
                slots.astype(numpy.uint64),
                numpy.full(len(slots), numpy.inf),
            )
            began = time.thread_time()
            index.add_found(number, range(start, start + len(slots)), found, [])
            slowest = max(slowest, time.thread_time() - began)
    keys = [f"k1/{at:0128x}" for at in range(2048)]
    began = time.perf_counter()
    index.find(keys)
    looked_s = time.perf_counter() - began
    slots_count = 128 * each
    return figures_of(
        f"index of {slots_count} slots",
        {
            "bytes a slot by its own account": index.nbytes / slots_count,
            "bytes a slot by the system's": (_rss() - before) / slots_count,
            "the longest step, ms of CPU": 1e3 * slowest,
            "2,048 keys looked up, ms": 1e3 * looked_s,
        },
    )


def _rss() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    """Measure, print, and exit 1 where a limit is missed."""
    parser = arguments_of(__doc__, (*_SIZES, "scan", "index"), rounds=5)
    parser.add_argument("--folder", default=None, help="on the disk to measure")
    parser.add_argument("--unverified", action="store_true")
    given, figures = parser.parse_args(), list[Figure]()
    for name in given.only:
        with tempfile.TemporaryDirectory(dir=given.folder) as made:
            folder, rounds = Path(made), given.rounds
            if name == "index":
                figures += _index()
            elif name == "scan":
                figures += asyncio.run(_scan(folder, rounds))
            else:
                measuring = _measure(
                    folder, name, rounds, is_verified=not given.unverified
                )
                figures += asyncio.run(measuring)
    report(figures, given)


if __name__ == "__main__":
    main()
