"""How much memory a process takes while 1 GiB goes through a bound of 64 MiB.

Once as entries through a lookup buffer, once as one stream through a pipe, from one
process to another over loopback; both have the bound, and the receiver forgets each
tensor before it asks for the next. This process samples both while they work; each
figure is the highest of a process above what it had just before ``serve`` or
``connect``, when its own tensors and an event loop were there already. With several
requests ``--outstanding``, entries that wait for room go straight to their consumer:
beside the buffer's bound, as promised up to as much again.

A sample is the private memory (``Pss_Anon``), the process's share of files
(``Pss_File``), and of shared memory either what is mapped of it (``Pss_Shmem``) or all
pages that its memory files have, mapped or not (``st_blocks``), whichever is more: the
same pages are in both, and are counted once. A file that both processes have counts for
the producer alone. The exit status is 1 if a limit is missed.

    python -m benchmarks.memory [--tensors 64] [--nbytes 16MiB] [--bound 64MiB]
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, TypeAlias

import torch

from asynckv import (
    KVLookupBuffer,
    LookupBuffer,
    connect,
    listen_pipe,
    open_pipe,
    serve,
)
from asynckv.cli.process import run
from asynckv.types import parse_bytes
from benchmarks.pairing.runs import Figure, arguments_of, report

__all__ = ("main",)

_MIB: Final = 2**20
_SHARE: Final = 1.1
_SIDES: Final = ("producer", "consumer")
_EVERY_S: Final = 0.001
_PAUSE_S: Final = 0.02
"""The receiver takes its time after every eighth tensor: all that may wait does."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What goes through which bound, by what way."""

    case: str
    url: str
    tensors: int
    nbytes: int
    bound: int
    outstanding: int


@dataclasses.dataclass(frozen=True)
class Sample:
    """Memory of one process at one moment, in bytes."""

    private: int
    files: int
    shared: int

    @property
    def total(self) -> int:
        return self.private + self.files + self.shared


_Side: TypeAlias = Callable[[Work, Connection], Awaitable[None]]


async def produce(work: Work, parent: Connection) -> None:
    """Send the tensors, made one by one in the same memory."""
    source = torch.ones(work.nbytes, dtype=torch.uint8)
    _meet(parent)
    if work.case == "lookup":
        async with (
            LookupBuffer(work.bound) as buffer,
            serve(work.url, lookup=buffer) as server,
        ):
            parent.send(server.url)
            entry_ids = []
            for index in range(work.tensors):
                source.fill_(index)
                entry_id = await buffer.insert([index], None, source, None, None)
                entry_ids.append(entry_id)
            for entry_id in entry_ids:
                await buffer.taken(entry_id)
    else:
        async with listen_pipe(work.url, max_bytes=work.bound) as listener:
            parent.send(listener.url)
            async with await listener.accept() as pipe:
                for index in range(work.tensors):
                    await pipe.send_tensor(source.fill_(index))


async def consume(work: Work, parent: Connection) -> None:
    """Receive the tensors, look at them, and forget each at once."""
    url = _meet(parent)
    if work.case == "lookup":
        async with connect(url, max_bytes=work.bound) as peer:
            left = iter(range(work.tensors))
            await asyncio.gather(
                *(_take_entries(peer.lookup, left) for _ in range(work.outstanding))
            )
    else:
        async with open_pipe(url, max_bytes=work.bound) as pipe:
            for index in range(work.tensors):
                tensor = await pipe.recv_tensor()
                _check(tensor, index)
                del tensor
                await _pause(index)


async def _take_entries(lookup: KVLookupBuffer, left: Iterator[int]) -> None:
    for index in left:
        entry = await lookup.drop_select([index])
        _check(entry.key, index)
        del entry
        await _pause(index)


def _meet(parent: Connection) -> str:
    parent.send("ready")
    answer: str = parent.recv()
    return answer


def _check(tensor: object, index: int) -> None:
    if isinstance(tensor, torch.Tensor):
        least, most = tensor.aminmax()  # which needs no memory of its own
        if int(least) == int(most) == index:
            return
    raise RuntimeError(f"tensor {index} is another than was sent")


async def _pause(index: int) -> None:
    if index % 8 == 0:
        await asyncio.sleep(_PAUSE_S)


def _run(side: _Side, work: Work, parent: Connection) -> None:
    async def main() -> None:
        await side(work, parent)
        parent.send("done")

    run(main())
    parent.recv()  # so that nothing is given back before the last sample


def sample(pid: int, counted: set[int]) -> Sample:
    """Look at one process; files in ``counted`` are another's, and its are added."""
    kinds = {"Pss_Anon": 0, "Pss_File": 0, "Pss_Shmem": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in kinds:
            kinds[name] = int(value.split()[0]) * 1024
    memory_files = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if "/memfd:asynckv" in str(fd.readlink()):
                stat = fd.stat()
                if stat.st_ino not in counted:
                    counted.add(stat.st_ino)
                    memory_files += stat.st_blocks * 512
    shared = max(kinds["Pss_Shmem"], memory_files)
    return Sample(kinds["Pss_Anon"], kinds["Pss_File"], shared)


def measure(work: Work) -> list[Figure]:
    """Let two processes do the work and sample both until they are done."""
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for side in (produce, consume):
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(side, work, theirs))
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        for end in ends:
            end.recv()
        pids = [process.pid or 0 for process in processes]
        began = _sample_all(pids)
        ends[0].send("")
        ends[1].send(ends[0].recv())
        peaks, samples = _watch(pids, began, ends)
        for end in ends:
            end.send("")
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    print(f"{work.case}: {samples} samples", flush=True)
    most_mib = work.bound * _SHARE / _MIB
    return [
        figure
        for side, before, peak in zip(_SIDES, began, peaks, strict=True)
        for figure in _figures(f"{work.case}, {side}: MiB", before, peak, most_mib)
    ]


def _sample_all(pids: Sequence[int]) -> list[Sample]:
    counted: set[int] = set()
    return [sample(pid, counted) for pid in pids]


def _watch(
    pids: Sequence[int], began: list[Sample], ends: list[Connection]
) -> tuple[list[Sample], int]:
    peaks, samples = list(began), 0
    busy = list(ends)
    while busy:
        both = zip(peaks, _sample_all(pids), strict=True)
        peaks = [max(pair, key=lambda s: s.total) for pair in both]
        samples += 1
        for end in [end for end in busy if end.poll(_EVERY_S)]:
            end.recv()  # EOFError where a process has failed
            busy.remove(end)
    return peaks, samples


def _figures(
    name: str, began: Sample, peak: Sample, most_mib: float
) -> Iterator[Figure]:
    yield Figure(f"{name} when it began", began.total / _MIB)
    for kind in ("private", "files", "shared"):
        above = getattr(peak, kind) - getattr(began, kind)
        yield Figure(f"{name} above that, {kind}", above / _MIB)
    above = peak.total - began.total
    yield Figure(f"{name} above that, in all", above / _MIB, at_most=most_mib)


def main() -> None:
    """Measure both ways, print each process's highest, exit 1 for a missed limit."""
    if not os.path.exists("/proc/self/smaps_rollup"):
        sys.exit("this needs Linux's /proc/PID/smaps_rollup")
    parser = arguments_of(
        __doc__,
        ("lookup", "pipe"),
        url="tcp://127.0.0.1:0",
        tensors=64,
        nbytes="16MiB",
        bound="64MiB",
        outstanding=1,
    )
    given, figures = parser.parse_args(), list[Figure]()
    nbytes, bound = parse_bytes(given.nbytes), parse_bytes(given.bound)
    for case in given.only:
        work = Work(case, given.url, given.tensors, nbytes, bound, given.outstanding)
        figures += measure(work)
    report(figures, given)


if __name__ == "__main__":
    main()
