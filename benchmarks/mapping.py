"""Hand-over of entries by shared memory, beside raw pings and memcpy in the same run.

Three processes: one that owns the entries, one that echoes raw TCP, and this one.
Each round does the work of asynckv once and each baseline twice, so that what
disturbs the one disturbs the other; what two equal baselines differ by (A/A) is
what a ratio cannot tell. Medians over the rounds; the cold first round apart.

    python -m benchmarks.mapping --rounds 9 --gib 1
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import resource
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import numpy
import torch

import asynckv
from asynckv.abc import KVEntry
from asynckv.cli.process import run
from benchmarks.pairing.cores import on_two_cores

__all__ = ("main",)

MIB = 2**20
_LAYERS = 64
_TOKENS = {"small": [1], "large": [2]}
_PINGS = 20
_HAND_OVERS = 20
_SMALL_ENTRIES = 64


def _echo(pipe: Connection) -> None:
    """Send back pings of 64 bytes, and ``n`` bytes for each request of 8 bytes."""
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    source = memoryview(bytearray(16 * MIB))
    source[::4096] = b"x" * len(source[::4096])
    while data := sock.recv(64):
        if len(data) == 64:
            sock.sendall(data)
            continue
        for _ in range(int.from_bytes(data, "big") // len(source)):
            sock.sendall(source)


async def _own(pipe: Connection, large_bytes: int) -> None:
    """Keep one entry of each kind there."""
    small = torch.ones(2 * MIB, dtype=torch.uint8)
    layer = torch.ones(large_bytes // _LAYERS, dtype=torch.uint8)
    layers = {f"layers.{number}": layer for number in range(_LAYERS)}
    max_bytes = int(2.25 * large_bytes) + 4 * _SMALL_ENTRIES * MIB
    async with (
        asynckv.LookupBuffer(max_bytes, max_deliver=10**9, drain_s=0) as buffer,
        asynckv.serve("tcp://127.0.0.1:0", lookup=buffer) as server,
    ):
        counts = {"small": 0, "large": 0}
        keeping = [
            *(
                asyncio.create_task(_keep(buffer, counts, "small", small))
                for _ in range(_SMALL_ENTRIES)
            ),
            asyncio.create_task(_keep(buffer, counts, "large", layers)),
        ]
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()

        def answer() -> None:
            try:
                pipe.recv()
                pipe.send((counts, _cpu_s()))
            except (EOFError, OSError):
                loop.remove_reader(pipe.fileno())
                gone.set()

        loop.add_reader(pipe.fileno(), answer)
        pipe.send(server.url)
        await gone.wait()
        for task in keeping:
            task.cancel()
        await asyncio.wait(keeping)


async def _keep(
    buffer: asynckv.LookupBuffer,
    counts: dict[str, int],
    kind: str,
    key: torch.Tensor | dict[str, torch.Tensor],
) -> None:
    while True:
        entry_id = await buffer.insert(_TOKENS[kind], None, key, None, None, ttl_s=None)
        counts[kind] += 1
        await buffer.taken(entry_id)


def _run_owner(pipe: Connection, large_bytes: int) -> None:
    run(_own(pipe, large_bytes))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Raw:
    """A blocking TCP connection to the echoing process."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._target = memoryview(bytearray(16 * MIB))

    def ping(self) -> float:
        """Return the time of one ping, in seconds."""
        begun = time.perf_counter()
        self.sock.sendall(b"x" * 64)
        left = 64
        while left:
            left -= len(self.sock.recv(left))
        return time.perf_counter() - begun

    def pings(self) -> float:
        """Return the median time of some, in seconds."""
        return statistics.median(self.ping() for _ in range(_PINGS))

    def move(self, nbytes: int) -> float:
        """Return the time of receiving so many bytes, in seconds."""
        begun = time.perf_counter()
        self.sock.sendall(nbytes.to_bytes(8, "big"))
        for _ in range(nbytes // len(self._target)):
            self.sock.recv_into(self._target, 0, socket.MSG_WAITALL)
        return time.perf_counter() - begun


class Memcpy:
    """Copies between memory that was touched before, in pieces of 1 MiB."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._source = numpy.ones(nbytes, numpy.uint8)
        self._target = numpy.ones(nbytes, numpy.uint8)

    def run(self) -> float:
        """Return the time of one copy, in seconds."""
        begun = time.perf_counter()
        numpy.copyto(self._target, self._source)
        return time.perf_counter() - begun


def _touch(entry: KVEntry) -> int:
    """Read one byte of each page."""
    return sum(
        int(tensor.numpy()[::4096].sum())
        for tensor in entry.tensors()
        if tensor.nbytes > MIB
    )


@contextlib.contextmanager
def _timed(times: list[float]) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    times.append(time.perf_counter() - begun)


class _GiveBack(Exception):
    """Leaves ``async with drop_select()`` so that the entry stays."""


class Owner:
    """The process that keeps the entries, as this one sees it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._taken = {"small": 0, "large": 0}

    def cpu_s(self) -> float:
        """Return its CPU seconds so far."""
        return self._ask()[1]

    async def ready(self, kind: str) -> list[int]:
        """Wait until the next entry is whole; return its tokens."""
        while self._ask()[0][kind] <= self._taken[kind]:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        self._taken[kind] += 1
        return _TOKENS[kind]

    def _ask(self) -> tuple[dict[str, int], float]:
        self._pipe.send(None)
        counts, cpu_s = self._pipe.recv()
        return counts, cpu_s


@contextlib.contextmanager
def _timed_until_entered(times: list[float]) -> Iterator[Callable[[], None]]:
    begun = time.perf_counter()
    yield lambda: times.append(time.perf_counter() - begun)


def _line(name: str, ratios: list[float], seconds: list[float], unit: str) -> None:
    low, high = min(ratios), max(ratios)
    print(
        f"{name:46} {statistics.median(ratios):7.2f} [{low:.2f}-{high:.2f}] {unit:8}"
        f" median {statistics.median(seconds) * 1e6:10.0f} us"
    )


async def _views(
    peer: asynckv.Peer, raw: Raw, owner: Owner, kind: str, rounds: int
) -> None:
    """Time hand-overs, given back: some in each round, and a ping before each.

    One more ping is not counted: while it goes the owner takes the last one back.
    Its A/A is every second ping beside the others.
    """
    medians: list[float] = []
    pings: list[tuple[float, float]] = []
    tokens = await owner.ready(kind)
    for number in range(rounds + 2):
        enters: list[float] = []
        here: list[float] = []
        for _ in range(_HAND_OVERS):
            await asyncio.sleep(0)  # what gives the last one back is written here
            raw.ping()
            here.append(raw.ping())
            selecting = peer.lookup.drop_select(tokens)
            with contextlib.suppress(_GiveBack), _timed_until_entered(enters) as timed:
                async with selecting as entry:
                    timed()
                    del entry  # what it costs to let go of it is not timed
                    raise _GiveBack
        if not number:
            print(f"{kind}: cold hand-over {enters[0] * 1e6:.0f} us")
        medians.append(statistics.median(enters))
        pings.append((statistics.median(here[::2]), statistics.median(here[1::2])))
    await peer.lookup.drop_select(tokens)  # the owner makes the next one
    means = [sum(pair) / 2 for pair in pings]
    _line(f"{kind}: hand-over / ping", _by(medians, means), medians[2:], "pings")
    _line("  A/A of pings", [b / a for a, b in pings[2:]], means[2:], "")


async def _acknowledged(
    peer: asynckv.Peer, raw: Raw, owner: Owner, kind: str, rounds: int
) -> None:
    """Time entering and leaving, one at a time, while the owner makes the next."""
    wholes: list[float] = []
    pings: list[tuple[float, float]] = []
    for _ in range(rounds + 2):
        tokens = await owner.ready(kind)
        before = raw.pings()
        with _timed(wholes):
            async with peer.lookup.drop_select(tokens):
                pass
        pings.append((before, raw.pings()))
    means = [sum(pair) / 2 for pair in pings]
    _line(f"{kind}: and acknowledged / ping", _by(wholes, means), wholes[2:], "pings")
    _line("  A/A of pings", [b / a for a, b in pings[2:]], means[2:], "")


async def _reads(peer: asynckv.Peer, memcpy: Memcpy, owner: Owner, rounds: int) -> None:
    """Time a hand-over with one read a page, beside memcpy."""
    times: list[float] = []
    copies: list[tuple[float, float]] = []
    for _ in range(rounds + 2):
        tokens = await owner.ready("large")
        before = memcpy.run()
        selecting = peer.lookup.drop_select(tokens)
        with _timed(times):
            entry = await selecting.__aenter__()
            _touch(entry)
        await selecting.__aexit__(None, None, None)
        del entry, selecting
        copies.append((before, memcpy.run()))
    print(f"large: hand-over and a read a page, cold: {times[0] * 1e3:.1f} ms")
    means = [sum(pair) / 2 for pair in copies]
    _line("large: hand-over + read a page / memcpy", _by(times, means), times[2:], "")
    _line("  A/A of memcpy", [b / a for a, b in copies[2:]], means[2:], "")


async def _plain(
    peer: asynckv.Peer, memcpy: Memcpy, raw: Raw, owner: Owner, rounds: int, name: str
) -> None:
    """Time a plain await, beside memcpy and one raw stream."""
    times: list[float] = []
    copies: list[tuple[float, float]] = []
    streams: list[float] = []
    cpu_s: list[float] = []
    nbytes = memcpy.nbytes
    for _ in range(rounds + 2):
        tokens = await owner.ready("large")
        before = memcpy.run()
        cpu = _cpu_s()
        with _timed(times):
            entry = await peer.lookup.drop_select(tokens)
        cpu_s.append((_cpu_s() - cpu) / nbytes * 1e9)
        del entry
        copies.append((before, memcpy.run()))
        streams.append(raw.move(nbytes))
    print(f"{name}: plain await, cold {times[0] * 1e3:.0f} ms")
    means = [sum(pair) / 2 for pair in copies]
    _line(f"{name}: memcpy / plain await", _by(means, times), times[2:], "memcpy")
    _line(f"{name}: raw TCP / plain await", _by(streams, times), streams[2:], "TCP")
    _line("  A/A of memcpy", [b / a for a, b in copies[2:]], means[2:], "")
    print(f"{name}: {statistics.median(cpu_s[2:]):.3f} CPU s per GB in the consumer")


async def _measure(
    url: str, raw: Raw, owner: Owner, pids: list[int], rounds: int, nbytes: int
) -> None:
    memcpy = Memcpy(nbytes)
    async with asynckv.connect(url, max_bytes=3 * nbytes) as peer:
        print(f"transport {peer.transport}")
        with on_two_cores(*pids):
            await _views(peer, raw, owner, "small", rounds)
            await _views(peer, raw, owner, "large", rounds)
            await _acknowledged(peer, raw, owner, "small", rounds * 5)
        await _reads(peer, memcpy, owner, rounds)
        await _plain(peer, memcpy, raw, owner, rounds, "edges")
    async with asynckv.connect(url, max_bytes=3 * nbytes, digest="full") as peer:
        await _plain(peer, memcpy, raw, owner, rounds, "full")


def _by(some: list[float], others: list[float]) -> list[float]:
    """Return each divided by its neighbour, but for the first two rounds."""
    return [a / b for a, b in zip(some, others, strict=True)][2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gib", type=float, default=1.0)
    options = parser.parse_args()
    nbytes = int(options.gib * 2**30)
    context = multiprocessing.get_context("spawn")
    echo_pipe, echo_end = context.Pipe()
    owner_pipe, owner_end = context.Pipe()
    processes = [
        context.Process(target=_echo, args=(echo_end,)),
        context.Process(target=_run_owner, args=(owner_end, nbytes)),
    ]
    for process in processes:
        process.start()
    echo_end.close()
    owner_end.close()
    try:
        raw = Raw(echo_pipe.recv())
        url = owner_pipe.recv()
        pids = [process.pid or 0 for process in processes]
        run(_measure(url, raw, Owner(owner_pipe), pids, options.rounds, nbytes))
        raw.sock.close()
    finally:  # they end by it
        owner_pipe.close()
        for process in processes:
            process.join()


if __name__ == "__main__":
    main()
