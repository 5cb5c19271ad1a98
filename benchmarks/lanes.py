"""Payload lanes beside a raw blocking stream, in one run, over loopback TCP.

Two processes; 64 tensors of 16 MiB into preallocated memory. Each round moves
them once by one raw stream (``sendall``, ``recv_into(MSG_WAITALL)``) and once
by each number of lanes, so that what disturbs the one disturbs the other.
``--digest known`` is what a buffer does: the sender's digest was made at insert.

    python benchmarks/lanes.py --lanes 1 2 4 --rounds 7
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import multiprocessing
import socket
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import torch

from asynckv.protocol.digests import digest_of
from asynckv.tensors.views import bytes_of
from asynckv.transports.inline import DEFAULT_CHUNK_BYTES, InlineTransport

__all__ = ("LagProbe", "main")

_RAW = 255


@dataclasses.dataclass(frozen=True)
class Work:
    """What every round moves, and by which transports."""

    tensors: int
    nbytes: int
    lanes: Sequence[int]
    digest: str
    chunk_bytes: int


class LagProbe:
    """How late an event loop runs a timer of one millisecond."""

    def __init__(self) -> None:
        self.lags_ms: list[float] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sample while the body runs."""
        task = asyncio.create_task(self._sample())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _sample(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            self.lags_ms.append((time.perf_counter() - before) * 1e3 - 1)

    def summary(self) -> str:
        """Return p99 and maximum, in milliseconds."""
        lags = sorted(self.lags_ms)
        return f"p99 {lags[int(len(lags) * 0.99)]:.1f} max {lags[-1]:.1f} ms"


def _memory(work: Work) -> list[memoryview]:
    return [
        bytes_of(torch.full((work.nbytes,), index % 251, dtype=torch.uint8))
        for index in range(work.tensors)
    ]


async def _open(work: Work, sockets: list[socket.socket]) -> list[InlineTransport]:
    transports = []
    loop = asyncio.get_running_loop()
    for lanes in work.lanes:
        transport = InlineTransport(
            lanes, work.digest != "off", loop, _raise, max_chunk_bytes=work.chunk_bytes
        )
        await transport.open(b"", [sockets.pop(0) for _ in range(lanes)])
        transports.append(transport)
    return transports


def _raise(error: Exception) -> None:
    raise error


async def _serve(work: Work, port: int) -> None:
    """The sending process: do what the control connection says."""
    control, *sockets = [
        socket.create_connection(("127.0.0.1", port))
        for _ in range(1 + sum(work.lanes))
    ]
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = _memory(work)
    known = [digest_of(source) if work.digest == "known" else None for source in memory]
    transports = await _open(work, sockets)
    loop = asyncio.get_running_loop()
    transfer = 0
    while True:
        control.setblocking(False)
        if not (order := await loop.sock_recv(control, 1)):
            break
        control.setblocking(True)
        if order[0] == _RAW:
            for source in memory:
                control.sendall(source)
            continue
        transfer += 1
        for digest in await _send(transports[order[0]], transfer, memory, known):
            control.sendall(digest)
    for transport in transports:
        await transport.aclose()
    control.close()


def _landing(count: int) -> list[asyncio.Future[bytes]]:
    loop = asyncio.get_running_loop()
    return [loop.create_future() for _ in range(count)]


def _settle(
    future: asyncio.Future[bytes], digest: bytes, error: BaseException | None
) -> None:
    if error is None:
        future.set_result(digest)
    else:
        future.set_exception(error)


async def _send(
    transport: InlineTransport,
    transfer: int,
    memory: list[memoryview],
    known: list[bytes | None],
) -> list[bytes]:
    futures = _landing(len(memory))
    for index, source in enumerate(memory):
        done = functools.partial(_settle, futures[index])
        transport.send(transfer, index, source, done, digest=known[index])
    return await asyncio.gather(*futures)


async def _receive(
    transport: InlineTransport,
    transfer: int,
    memory: list[memoryview],
    control: socket.socket,
    order: int,
) -> None:
    loop = asyncio.get_running_loop()
    futures = _landing(len(memory))
    for index, target in enumerate(memory):
        done = functools.partial(_settle, futures[index])
        transport.receive(transfer, index, target, done)
    control.setblocking(False)
    await loop.sock_sendall(control, bytes([order]))
    found = b"".join(await asyncio.gather(*futures))
    claimed = b""
    while len(claimed) < len(found):
        claimed += await loop.sock_recv(control, len(found))
    assert claimed == found


def _receive_raw(memory: list[memoryview], control: socket.socket) -> None:
    control.setblocking(True)
    control.sendall(bytes([_RAW]))
    for target in memory:
        got = 0
        while got < target.nbytes:
            got += control.recv_into(target[got:], 0, socket.MSG_WAITALL)


async def _measure(work: Work, listener: socket.socket, rounds: int) -> None:
    control, *sockets = [listener.accept()[0] for _ in range(1 + sum(work.lanes))]
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = _memory(work)
    transports = await _open(work, sockets)
    idle, probes = LagProbe(), [LagProbe() for _ in work.lanes]
    async with idle.running():
        await asyncio.sleep(1)
    ratios: list[list[float]] = [[] for _ in work.lanes]
    raw_s = []
    for transfer in range(1, rounds * len(work.lanes) + 1):
        which = transfer % len(work.lanes)
        before = time.perf_counter()
        _receive_raw(memory, control)
        raw_s.append(time.perf_counter() - before)
        async with probes[which].running():
            before = time.perf_counter()
            await _receive(transports[which], transfer, memory, control, which)
        ratios[which].append(raw_s[-1] / (time.perf_counter() - before))
    total = work.tensors * work.nbytes / 1e9
    print(f"raw, one stream: {total / statistics.median(raw_s):.2f} GB/s")
    print(f"idle loop lag: {idle.summary()}")
    for lanes, ratio, probe in zip(work.lanes, ratios, probes, strict=True):
        spread = f"[{min(ratio):.2f}-{max(ratio):.2f}]"
        print(
            f"{lanes} lanes: {statistics.median(ratio):.2f} {spread} of raw, "
            f"loop lag {probe.summary()}"
        )
    control.close()
    for transport in transports:
        await transport.aclose()


def _run_sender(work: Work, port: int) -> None:
    asyncio.run(_serve(work, port))


def main() -> None:
    """Measure and print one line for each number of lanes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--nbytes", type=int, default=16 * 2**20)
    parser.add_argument("--chunk-bytes", type=int, default=DEFAULT_CHUNK_BYTES)
    parser.add_argument("--digest", choices=["full", "known", "off"], default="full")
    given = parser.parse_args()
    work = Work(
        given.tensors,
        given.nbytes,
        given.lanes,
        given.digest,
        given.chunk_bytes,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        sender = context.Process(target=_run_sender, args=(work, port))
        sender.start()
        asyncio.run(_measure(work, listener, given.rounds))
        sender.join()


if __name__ == "__main__":
    main()
