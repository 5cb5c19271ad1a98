"""What a pipe between two processes of one host moves, by memory and by sockets.

1 GiB as 64 tensors of 16 MiB, received with ``into=``. In each round, in turns: one
``memcpy``, one raw TCP stream of blocking sockets in threads, a pipe by ``map`` with
the digests ``edges`` and ``full``, and the same pipe by lanes (``?payload=inline``).
Beside each receiver its event loop ticks once a millisecond: how late it is, is its
lag. The figures are medians of the rounds' ratios.

    python -m benchmarks.piping_by_map [--rounds 9] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import numpy
import torch

import asynckv
from asynckv.pipes.pipe import Pipe

__all__ = ("main",)

_COUNT: Final = 64
_NBYTES: Final = 16 * 2**20
_TICK_S: Final = 0.001
_PIPES: Final = (("edges", ""), ("full", ""), ("full", "?payload=inline"))
_NAMES: Final = ("map, edges", "map, full", "lanes, full")

_Receive = Callable[[], Awaitable[None]]


async def _ticking(lags: list[float]) -> None:
    while True:
        began_s = time.perf_counter()
        await asyncio.sleep(_TICK_S)
        lags.append(time.perf_counter() - began_s - _TICK_S)


async def _timed(receive: _Receive) -> dict[str, float]:
    lags: list[float] = []
    ticking = asyncio.create_task(_ticking(lags))
    await asyncio.sleep(0.01)
    began_s = time.perf_counter()
    await receive()
    took_s = time.perf_counter() - began_s
    ticking.cancel()
    lags.sort()
    return {"s": took_s, "lag_ms": lags[int(len(lags) * 0.99)] * 1e3}


async def _receive(urls: list[str], port: int) -> None:
    """Be the receiving process: do what each line of standard input names."""
    into = torch.ones(_NBYTES, dtype=torch.uint8)
    raw = socket.create_connection(("127.0.0.1", port))

    def receive_raw() -> None:
        memory = into.numpy().data
        for _ in range(_COUNT):
            raw.recv_into(memory, _NBYTES, socket.MSG_WAITALL)

    async def from_pipe(pipe: Pipe) -> None:
        for _ in range(_COUNT):
            await pipe.recv_tensor(into=into)

    async with contextlib.AsyncExitStack() as stack:
        ways: dict[str, _Receive] = {"raw": lambda: asyncio.to_thread(receive_raw)}
        for name, (digest, _), url in zip(_NAMES, _PIPES, urls, strict=True):
            options: Any = {"digest": digest, "lanes": 1}
            pipe = await stack.enter_async_context(asynckv.open_pipe(url, **options))
            ways[name] = lambda pipe=pipe: from_pipe(pipe)  # type: ignore[misc]
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            print("ready", flush=True)
            print(json.dumps(await _timed(ways[line])), flush=True)
    raw.close()


@contextlib.asynccontextmanager
async def _receiver(
    urls: list[str], port: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    command = (sys.executable, "-m", "benchmarks.piping_by_map", "--receive", str(port))
    process = await asyncio.create_subprocess_exec(
        *(*command, *urls),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    yield process
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()


def _memcpy_s(source: torch.Tensor, target: torch.Tensor) -> float:
    began_s = time.perf_counter()
    for _ in range(_COUNT):
        numpy.copyto(target.numpy(), source.numpy())
    return time.perf_counter() - began_s


async def _measure(rounds: int) -> list[dict[str, dict[str, float]]]:
    source = torch.full((_NBYTES,), 7, dtype=torch.uint8)
    target = torch.zeros(_NBYTES, dtype=torch.uint8)
    found: list[dict[str, dict[str, float]]] = []
    listening = socket.create_server(("127.0.0.1", 0))
    async with contextlib.AsyncExitStack() as stack:
        listeners = []
        for digest, query in _PIPES:
            options: Any = {"digest": digest, "lanes": 1}
            opened = asynckv.listen_pipe(f"tcp://127.0.0.1:0{query}", **options)
            listeners.append(await stack.enter_async_context(opened))
        urls = [listener.url for listener in listeners]
        port = listening.getsockname()[1]
        process = await stack.enter_async_context(_receiver(urls, port))
        assert process.stdin is not None and process.stdout is not None
        raw, _ = await asyncio.to_thread(listening.accept)
        pipes = {}
        for name, listener in zip(_NAMES, listeners, strict=True):
            pipe = await listener.accept()
            pipes[name] = await stack.enter_async_context(pipe)
        await asyncio.sleep(0.5)
        assert [p.transport for p in pipes.values()] == ["map", "map", "inline"]

        def send_raw() -> None:
            for _ in range(_COUNT):
                raw.sendall(source.numpy().data)

        for number in range(rounds + 1):
            one = {"memcpy": {"s": _memcpy_s(source, target)}}
            for name in ("raw", *pipes):
                process.stdin.write(f"{name}\n".encode())
                await process.stdout.readline()
                if name == "raw":
                    thread = threading.Thread(target=send_raw)
                    thread.start()
                else:
                    for _ in range(_COUNT):
                        await pipes[name].send_tensor(source)
                one[name] = json.loads(await process.stdout.readline())
                if name == "raw":
                    thread.join()
            if number:  # the first one touches all memory
                found.append(one)
        raw.close()
    listening.close()
    return found


def _report(found: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    report: dict[str, Any] = {"rounds": len(found)}
    for name in ("raw", *_NAMES):
        report[name] = {
            "s": statistics.median(one[name]["s"] for one in found),
            "of memcpy": statistics.median(
                one["memcpy"]["s"] / one[name]["s"] for one in found
            ),
            "of raw TCP": statistics.median(
                one["raw"]["s"] / one[name]["s"] for one in found
            ),
            "of lanes": statistics.median(
                one["lanes, full"]["s"] / one[name]["s"] for one in found
            ),
            "lag p99 ms": statistics.median(one[name]["lag_ms"] for one in found),
        }
    report["memcpy"] = {"s": statistics.median(one["memcpy"]["s"] for one in found)}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.piping_by_map")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--receive", type=int, help=argparse.SUPPRESS)
    parser.add_argument("urls", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive is not None:
        asyncio.run(_receive(args.urls, args.receive))
        return
    report = _report(asyncio.run(_measure(args.rounds)))
    if args.json:
        print(json.dumps(report, indent=1))
        return
    for name, figures in report.items():
        print(name, figures)


if __name__ == "__main__":
    main()
