"""Hand-over of entries by shared memory, beside raw pings and memcpy in the same run.

Three processes: one that owns the entries, one that echoes raw TCP, and this one.
Each round does the work of asynckv once and each baseline twice, so that what
disturbs the one disturbs the other; what two equal baselines differ by (A/A) is
what a ratio cannot tell. Medians over the rounds; the cold first round apart.

    python benchmarks/mapping.py --rounds 9 --gib 1
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
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

__all__ = ("main",)

MIB = 2**20
_LAYERS = 64
_SMALL = [1]
_LARGE = [2]
_PINGS = 20


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
    max_bytes = int(2.25 * large_bytes) + 64 * MIB
    async with (
        asynckv.LookupBuffer(max_bytes, drain_s=0) as buffer,
        asynckv.serve("tcp://127.0.0.1:0", lookup=buffer) as server,
    ):

        async def keep(
            tokens: list[int], key: torch.Tensor | dict[str, torch.Tensor]
        ) -> None:
            while True:
                entry_id = await buffer.insert(
                    tokens, None, key, None, None, ttl_s=None
                )
                await buffer.taken(entry_id)

        keeping = [
            asyncio.create_task(keep(_SMALL, small)),
            asyncio.create_task(keep(_LARGE, layers)),
        ]
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()
        loop.add_reader(pipe.fileno(), asked.set)
        pipe.send(server.url)
        with contextlib.suppress(EOFError):
            while True:
                await asked.wait()
                asked.clear()
                pipe.recv()
                pipe.send(_cpu_s())
        loop.remove_reader(pipe.fileno())
        for task in keeping:
            task.cancel()
        await asyncio.wait(keeping)


def _run_owner(pipe: Connection, large_bytes: int) -> None:
    asyncio.run(_own(pipe, large_bytes))


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
        """Return the median time of some pings, in seconds."""
        times = []
        for _ in range(_PINGS):
            begun = time.perf_counter()
            self.sock.sendall(b"x" * 64)
            left = 64
            while left:
                left -= len(self.sock.recv(left))
            times.append(time.perf_counter() - begun)
        return statistics.median(times)

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


async def _there(peer: asynckv.Peer, tokens: list[int]) -> None:
    while not await peer.lookup.peek(tokens):  # noqa: ASYNC110 - it is another's
        await asyncio.sleep(0.002)


def _line(name: str, ratios: list[float], seconds: list[float], unit: str) -> None:
    low, high = min(ratios), max(ratios)
    print(
        f"{name:46} {statistics.median(ratios):7.2f} [{low:.2f}-{high:.2f}] {unit:8}"
        f" median {statistics.median(seconds) * 1e6:10.0f} us"
    )


async def _views(
    peer: asynckv.Peer, raw: Raw, tokens: list[int], rounds: int
) -> list[KVEntry]:
    """Time entering and leaving, each beside pings."""
    enters: list[float] = []
    wholes: list[float] = []
    pings: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        await _there(peer, tokens)
        before = raw.ping()
        with _timed(wholes):
            selecting = peer.lookup.drop_select(tokens)
            with _timed(enters):
                entry = await selecting.__aenter__()
            await selecting.__aexit__(None, None, None)
        pings.append((before, raw.ping()))
        del entry, selecting
    what = "2 MiB" if tokens is _SMALL else "large"
    print(
        f"{what}: cold {enters[0] * 1e6:.0f} us, ping "
        f"{statistics.median(min(p) for p in pings) * 1e6:.0f} us"
    )
    means = [sum(p) / 2 for p in pings][1:]
    enters, wholes = enters[1:], wholes[1:]
    _line(
        f"{what}: enter / ping",
        [e / m for e, m in zip(enters, means, strict=True)],
        enters,
        "pings",
    )
    _line(
        f"{what}: enter and leave / ping",
        [w / m for w, m in zip(wholes, means, strict=True)],
        wholes,
        "pings",
    )
    _line("  A/A of pings", [b / a for a, b in pings[1:]], means, "")
    return []


async def _reads(peer: asynckv.Peer, memcpy: Memcpy, rounds: int) -> None:
    """Time a hand-over with one read a page, beside memcpy."""
    times: list[float] = []
    copies: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        await _there(peer, _LARGE)
        before = memcpy.run()
        selecting = peer.lookup.drop_select(_LARGE)
        with _timed(times):
            entry = await selecting.__aenter__()
            _touch(entry)
        await selecting.__aexit__(None, None, None)
        del entry, selecting
        copies.append((before, memcpy.run()))
    print(f"large: hand-over and a read a page, cold: {times[0] * 1e3:.1f} ms")
    means = [sum(c) / 2 for c in copies]
    _line(
        "large: hand-over + read a page / memcpy",
        [t / m for t, m in zip(times, means, strict=True)][1:],
        times[1:],
        "memcpy",
    )
    _line("  A/A of memcpy", [b / a for a, b in copies[1:]], means[1:], "")


async def _plain(
    peer: asynckv.Peer,
    memcpy: Memcpy,
    raw: Raw,
    nbytes: int,
    rounds: int,
    owner_cpu_s: Callable[[], float],
    name: str,
) -> None:
    """Time a plain await, beside memcpy and one raw stream."""
    times: list[float] = []
    copies: list[tuple[float, float]] = []
    streams: list[float] = []
    cpu_s: list[float] = []
    for _ in range(rounds + 2):
        await _there(peer, _LARGE)
        before = memcpy.run()
        cpu = _cpu_s() + owner_cpu_s()
        with _timed(times):
            entry = await peer.lookup.drop_select(_LARGE)
        cpu_s.append(_cpu_s() - cpu)
        del entry
        copies.append((before, memcpy.run()))
        streams.append(raw.move(nbytes))
    print(f"{name}: plain await, cold {times[0] * 1e3:.0f} ms")
    means = [sum(c) / 2 for c in copies]
    speeds = [m / t for t, m in zip(times, means, strict=True)][2:]
    _line(f"{name}: memcpy / plain await", speeds, times[2:], "memcpy")
    _line(
        f"{name}: raw TCP / plain await",
        [s / t for s, t in zip(streams, times, strict=True)][2:],
        streams[2:],
        "raw TCP",
    )
    _line("  A/A of memcpy", [b / a for a, b in copies[2:]], means[2:], "")


async def _measure(
    url: str, raw: Raw, owner: Connection, rounds: int, nbytes: int
) -> None:
    def owner_cpu_s() -> float:
        owner.send(None)
        return float(owner.recv())

    memcpy = Memcpy(nbytes)
    async with asynckv.connect(url, max_bytes=3 * nbytes) as peer:
        print(f"transport {peer.transport}, pid {os.getpid()}")
        await _views(peer, raw, _SMALL, rounds * 30)
        await _views(peer, raw, _LARGE, rounds)
        await _reads(peer, memcpy, rounds)
        await _views(peer, raw, _LARGE, rounds)
        await _plain(peer, memcpy, raw, nbytes, rounds, owner_cpu_s, "edges")
    async with asynckv.connect(url, max_bytes=3 * nbytes, digest="full") as peer:
        await _plain(peer, memcpy, raw, nbytes, rounds, owner_cpu_s, "full")


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
    raw = Raw(echo_pipe.recv())
    asyncio.run(_measure(owner_pipe.recv(), raw, owner_pipe, options.rounds, nbytes))
    raw.sock.close()
    owner_pipe.close()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
