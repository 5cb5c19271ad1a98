"""The disk tier beside bare threads on the same disk, in one run.

Four threads on either side. The tier is called with eight values at a time, and while
these are verified with eight others. All of it is by direct I/O, so every read is cold.
What the tier moves is verified by its digest, in threads of the rig; what stands beside
it is not; ``--unverified`` leaves that out. Rounds alternate; a ratio is the median of
those of each round, and the A/A is of the raw threads with themselves.

Then a scan beside bare ``pread``s of the same pages by as many threads, and what the
index of two million slots takes.

    python -m benchmarks.disk_tier [--rounds 5] [--folder /var/tmp] [--only 2MiB]
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import itertools
import mmap
import os
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import numpy

from asynckv.abc.tiers import TierMemory, TierResult, TierValue, WantedValue
from asynckv.protocol.wire import digest_of
from asynckv.stores.disk import DiskTier
from asynckv.stores.disk.calls import FileCalls
from asynckv.stores.disk.index import SlotIndex
from asynckv.stores.disk.segments import Segment
from asynckv.stores.disk.slots import FoundSlots

__all__ = ("main",)

_PAGE = 4096
_PIECE = 2**20
_AT_ONCE = 8
_CALLS = 2
_THREADS = 4
_LEAST_TOTAL = 256 * 2**20
_LEAST_VALUES = 64
_SIZES = {"256KiB": 256 * 1024, "2MiB": 2 * 2**20, "16MiB": 16 * 2**20}


def _total(nbytes: int) -> int:
    """Return how much a round moves: many values, that a beginning is no matter."""
    return max(_LEAST_TOTAL, _LEAST_VALUES * nbytes)


_BARS = {
    ("2MiB", "read", "raw"): 0.9,
    ("2MiB", "write", "raw"): 0.9,
    ("16MiB", "read", "raw"): 0.9,
    ("16MiB", "write", "raw"): 0.9,
    ("256KiB", "read", "files"): 0.6,
    ("256KiB", "write", "files"): 1.5,
}


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
        self.header_nbytes, self.digest = len(header), bytes(header)
        return TierMemory(len(self.memory), [self.memory], [self.memory])


def _memories(nbytes: int) -> list[memoryview]:
    """Return memory for what is under way at once, all of it touched."""
    made = [memoryview(mmap.mmap(-1, nbytes)) for _ in range(_CALLS * _AT_ONCE)]
    for number, memory in enumerate(made):
        block = os.urandom(_PIECE)
        for start in range(0, nbytes, _PIECE):
            piece = memory[start : start + _PIECE]
            piece[:] = block[: len(piece)]
        memory[:8] = number.to_bytes(8, "little")
    return made


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


class _Raw:
    """One preallocated file, by direct I/O, in pieces of 1 MiB."""

    def __init__(self, folder: Path, nbytes: int, memories: list[memoryview]) -> None:
        self._fd = FileCalls().open(str(folder / "raw"), is_direct=True)
        os.posix_fallocate(self._fd, 0, _total(nbytes))
        self._nbytes, self._memories = nbytes, memories

    def write(self) -> float:
        return self._run(os.pwritev)

    def read(self) -> float:
        return self._run(os.preadv)

    def close(self) -> None:
        os.close(self._fd)

    def _run(self, call: _Call) -> float:
        return _by_threads(
            _total(self._nbytes) // self._nbytes,
            lambda job, worker: _move(
                call, self._fd, self._memories[worker], job * self._nbytes
            ),
        )


class _Files:
    """A file a value, by direct I/O, renamed when it is written."""

    def __init__(self, folder: Path, nbytes: int, memories: list[memoryview]) -> None:
        self._folder = folder / "files"
        self._folder.mkdir()
        self._nbytes, self._memories = nbytes, memories

    def write(self) -> float:
        def work(job: int, worker: int) -> None:
            path = f"{self._folder}/{job}"
            fd = FileCalls().open(f"{path}.tmp", is_direct=True)
            _move(os.pwritev, fd, self._memories[worker], 0)
            os.close(fd)
            os.rename(f"{path}.tmp", path)

        return _by_threads(_total(self._nbytes) // self._nbytes, work)

    def read(self) -> float:
        def work(job: int, worker: int) -> None:
            fd = FileCalls().open(f"{self._folder}/{job}", is_direct=True)
            _move(os.preadv, fd, self._memories[worker], 0)
            os.close(fd)

        return _by_threads(_total(self._nbytes) // self._nbytes, work)

    def close(self) -> None:
        shutil.rmtree(self._folder)


_Batch = Sequence[tuple[int, memoryview]]


class _Tier:
    """The tier, as a store has it: eight values at a time, verified."""

    def __init__(self, tier: DiskTier, nbytes: int, memories: list[memoryview]) -> None:
        self._tier, self._nbytes, self._memories = tier, nbytes, memories
        self._pool = concurrent.futures.ThreadPoolExecutor(2)
        self._turn = 0
        self.lag_s = 0.0
        self.lags_s: list[float] = []
        """The most of each round."""
        self.is_verified = True

    async def write(self) -> float:
        self._turn += 1  # new keys, in the room of the least wanted once it is full
        return await self._run(self._store)

    async def read(self) -> float:
        return await self._run(self._fetch)

    def close(self) -> None:
        self._pool.shutdown()

    async def _run(self, call: Callable[[_Batch], Awaitable[None]]) -> float:
        left = iter(range(_total(self._nbytes) // self._nbytes))

        async def work(memories: Sequence[memoryview]) -> None:
            while batch := list(
                zip(itertools.islice(left, _AT_ONCE), memories, strict=False)
            ):
                await call(batch)

        self.lag_s = 0.0
        ticking = asyncio.ensure_future(self._tick())
        began = time.perf_counter()
        halves = [self._memories[:_AT_ONCE], self._memories[_AT_ONCE:]]
        await asyncio.gather(*map(work, halves))
        seconds = time.perf_counter() - began
        ticking.cancel()
        await asyncio.wait({ticking})
        self.lags_s.append(self.lag_s)
        return seconds

    def _key_of(self, job: int) -> str:
        return f"k1/{self._turn}/{job}"

    async def idle_lag(self) -> float:
        """Return how late the loop is at most while nothing is done for a second."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._tick()
        idle_s, self.lag_s = self.lag_s, 0.0
        return idle_s

    async def _tick(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            self.lag_s = max(self.lag_s, time.perf_counter() - before - 0.001)

    async def _digests(self, batch: _Batch) -> list[bytes]:
        if not self.is_verified:
            return [b"unverified"] * len(batch)
        loop = asyncio.get_running_loop()
        memories = [memory for _, memory in batch]
        return await loop.run_in_executor(
            self._pool, lambda: list(map(digest_of, memories))
        )

    async def _store(self, batch: _Batch) -> None:
        headers = await self._digests(batch)
        places = [TierMemory(len(one), [one], [one]) for _, one in batch]
        values = [
            TierValue(self._key_of(job), header, place)
            for (job, _), header, place in zip(batch, headers, places, strict=True)
        ]
        results = set(await self._tier.store(values))
        _expect(results == {TierResult.DONE}, f"stored: {results}")

    async def _fetch(self, batch: _Batch) -> None:
        wanted = [_Wanted(self._key_of(job), memory) for job, memory in batch]
        results = set(await self._tier.fetch(wanted))
        _expect(results == {TierResult.DONE}, f"fetched: {results}")
        digests = await self._digests(batch)
        _expect(digests == [one.digest for one in wanted], "wrong bytes")


async def _measure(folder: Path, name: str, rounds: int, *, is_verified: bool) -> None:
    nbytes = _SIZES[name]
    memories = _memories(nbytes)
    raw, files = _Raw(folder, nbytes, memories), _Files(folder, nbytes, memories)
    async with DiskTier(folder / "kv", 2 * _total(nbytes)) as opened:
        await opened.probe()
        tier = _Tier(opened, nbytes, memories)
        tier.is_verified = is_verified
        took: dict[str, list[float]] = {}
        idle_s = await tier.idle_lag()
        for _ in range(rounds + 1):
            for what in ("write", "read"):
                for side, seconds in (
                    ("raw", getattr(raw, what)()),
                    ("tier", await getattr(tier, what)()),
                    ("files", getattr(files, what)()),
                    ("again", getattr(raw, what)()),
                ):
                    took.setdefault(f"{what} {side}", []).append(seconds)
        tier.close()
    for what in ("write", "read"):
        _report(name, what, {k: v[1:] for k, v in took.items()})
    _say(
        f"{name:8} most lag of the loop: {1e3 * statistics.median(tier.lags_s):.1f} ms "
        f"in the median round, {1e3 * max(tier.lags_s):.1f} ms in the worst; "
        f"of an idle one {1e3 * idle_s:.1f} ms"
    )
    raw.close()
    files.close()
    shutil.rmtree(folder / "kv")


def _report(name: str, what: str, took: dict[str, list[float]]) -> None:
    for side in ("raw", "files"):
        ratio = _ratio(took[f"{what} {side}"], took[f"{what} tier"])
        bar = _BARS.get((name, what, side))
        verdict = "" if bar is None else f"bar {bar}: {'ok' if ratio >= bar else 'NO'}"
        _say(f"{name:8} {what:5} of {side:5} {ratio:5.2f} {verdict}")
    again = _ratio(took[f"{what} raw"], took[f"{what} again"])
    rate = _total(_SIZES[name]) / statistics.median(took[f"{what} tier"]) / 1e6
    _say(f"{name:8} {what:5} A/A      {again:5.2f}   the tier: {rate:.0f} MB/s")


def _ratio(one: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


_SCANNED = 20_000
_INF = float("inf")


async def _scan(folder: Path, rounds: int) -> None:
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
            _expect(len(await tier.contains(["k1/0"])) == 1, "it answers")
            slots = tier.statistics().slots
            _expect(tier.statistics().keys == _SCANNED, "all were found")
        ratios.append(seconds / bare)
        again.append(_bare_scan(path) / bare)
    _say(
        f"scan of {slots} slots: {statistics.median(ratios):.2f} of bare preads, "
        f"A/A {statistics.median(again):.2f}; bar 1.2; {slots / seconds:.0f} slots/s"
    )
    shutil.rmtree(path)


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


def _index() -> None:
    """Two million slots in 128 files, found as a scan finds them."""
    before = _rss()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        index = SlotIndex(lambda work: _forget(pool.submit(work)))
        _fill_index(index, before)


def _forget(begun: concurrent.futures.Future[None]) -> None:
    """Nobody waits for it."""


def _fill_index(index: SlotIndex, before: int) -> None:
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
    _say(
        f"index of {slots_count} slots: {index.nbytes / slots_count:.0f} bytes a slot "
        f"by its own account, {(_rss() - before) / slots_count:.0f} by the system's; "
        f"the longest step {1e3 * slowest:.2f} ms of CPU; 2,048 keys looked up in "
        f"{1e3 * looked_s:.2f} ms"
    )


def _rss() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise AssertionError(otherwise)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextlib.contextmanager
def _folder(within: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=within) as folder:
        yield Path(folder)


def main() -> None:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="on the disk to measure")
    parser.add_argument("--unverified", action="store_true")
    parser.add_argument("--only", choices=(*_SIZES, "scan", "index"), default=None)
    options = parser.parse_args()
    for name in _SIZES:
        if options.only in (None, name):
            with _folder(options.folder) as folder:
                measuring = _measure(
                    folder, name, options.rounds, is_verified=not options.unverified
                )
                asyncio.run(measuring)
    if options.only in (None, "scan"):
        with _folder(options.folder) as folder:
            asyncio.run(_scan(folder, options.rounds))
    if options.only in (None, "index"):
        _index()
    _say(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
