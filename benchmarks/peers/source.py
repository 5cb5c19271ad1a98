"""The processes that payload comes from; each ends when its pipe is closed."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from multiprocessing.connection import Connection
from typing import Final

from asynckv.cli.bench.server import serving
from asynckv.cli.bench.settings import Settings
from asynckv.cli.process import run
from benchmarks.peers.kinds import peer_class
from benchmarks.peers.work import Pool, Work

__all__ = ("Served", "Source", "cpu_s_of", "own_process", "serving_peer", "serving_us")

_START_S: Final = 90.0
_STOP_GRACE_S: Final = 5.0

Served = Callable[[], AbstractAsyncContextManager[str]]
"""Serves while it is entered, and yields the address."""


class Source:
    """A process that serves. Made by :func:`own_process`."""

    def __init__(self, pid: int, address: str) -> None:
        self.pid = pid
        self.address = address

    def pause(self) -> None:
        """Stop it, so that it takes no CPU; its memory and sockets stay."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)


def cpu_s_of(pid: int) -> float:
    """Return the CPU seconds that a process has used, all of its threads."""
    # The number of that process's clock, as clock_getcpuclockid(3) makes it.
    return time.clock_gettime(~pid << 3 | 2)


@contextlib.asynccontextmanager
async def serving_us(url: str, settings: Settings) -> AsyncIterator[str]:
    """Serve asynckv, and the raw baseline beside it."""
    async with serving(url, settings) as address:
        yield address


@contextlib.asynccontextmanager
async def serving_peer(name: str, works: Sequence[Work]) -> AsyncIterator[str]:
    """Serve a peer with a pool of its own."""
    kind = peer_class(name)
    os.environ.update(kind.environ)
    peer = kind(Pool.source(works), works)
    try:
        yield await peer.serve()
    finally:
        await peer.aclose()


@contextlib.asynccontextmanager
async def own_process(served: Served) -> AsyncIterator[Source]:
    """Start a process, yield it once it serves, and end it at the end.

    :raises ChildProcessError: it cannot serve, or says nothing for long
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(served, there), daemon=False)
    await asyncio.to_thread(process.start)
    there.close()
    source = Source(process.pid or 0, "")
    try:
        source.address = await asyncio.to_thread(_address_from, here)
        yield source
    finally:
        here.close()
        if process.is_alive():
            source.resume()
        process.join(_STOP_GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


def _address_from(pipe: Connection) -> str:
    if not pipe.poll(_START_S):
        raise ChildProcessError(f"the source says nothing for {_START_S:.0f} s")
    try:
        status, _, text = pipe.recv_bytes().decode().partition(" ")
    except EOFError:
        raise ChildProcessError("the source ended before it served") from None
    if status != "serves":
        raise ChildProcessError(text)
    return text


def _run(served: Served, pipe: Connection) -> None:
    run(_serve(served, pipe))


async def _serve(served: Served, pipe: Connection) -> None:
    async with contextlib.AsyncExitStack() as stack:
        try:
            address = await stack.enter_async_context(served())
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is the reason
            pipe.send_bytes(f"fails {type(exc).__name__}: {exc}".encode())
            return
        pipe.send_bytes(f"serves {address}".encode())
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        loop.add_reader(pipe.fileno(), over.set_result, None)
        await over
        loop.remove_reader(pipe.fileno())
