"""The other processes of a benchmark, each of which ends when its pipe is closed."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from multiprocessing.connection import Connection
from typing import Final

from asynckv.cli.bench.report import Settings
from asynckv.cli.bench.rig import Rig, open_rig
from asynckv.cli.bench.server import serving
from asynckv.cli.process import LoopName, run

__all__ = (
    "INLINE",
    "OwnProcess",
    "Served",
    "cpu_s_of",
    "on_two_cores",
    "own_process",
    "own_rig",
)

_START_S: Final = 90.0
_STOP_GRACE_S: Final = 5.0
INLINE: Final = "?payload=inline"
"""Keeps peers of one host from mapping memory, as they choose by themselves."""

Served = Callable[[], AbstractAsyncContextManager[str]]
"""Serves while it is entered, and yields the address."""


class OwnProcess:
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
async def own_process(
    served: Served, loop: LoopName = "auto"
) -> AsyncIterator[OwnProcess]:
    """Start a process, yield it once it serves, and end it at the end.

    :raises ChildProcessError: it cannot serve, or says nothing for long
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(served, there, loop), daemon=False)
    await asyncio.to_thread(process.start)
    there.close()
    source = OwnProcess(process.pid or 0, "")
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


@contextlib.asynccontextmanager
async def own_rig(
    settings: Settings, url: str = "tcp://127.0.0.1:0", query: str = INLINE
) -> AsyncIterator[tuple[Rig, int]]:
    """Serve a bench in a process of its own; yield its rig, and its process's number.

    The baselines' raw sockets are those of ``asynckv bench``.
    """
    async with own_process(partial(serving, url, settings), settings.loop) as there:
        async with open_rig(f"{there.address}{query}", settings) as rig:
            yield rig, there.pid


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


def _run(served: Served, pipe: Connection, loop: LoopName) -> None:
    run(_serve(served, pipe), loop)
    # The baselines' threads may hold the last of torch's memory: one that lets go of
    # it while the interpreter ends takes the process down.
    sys.stdout.flush()
    os._exit(0)


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


@contextlib.contextmanager
def on_two_cores(*pids: int) -> Iterator[None]:
    """Keep this process and those others on a core each, with all their threads.

    Left alone, the scheduler puts two blocking threads on one core or on two as it
    likes, and a ping between them takes 16 us or 70; event loops it keeps on two.
    """
    cores = sorted(os.sched_getaffinity(0))
    _keep_on(os.getpid(), cores[:1])
    for pid in pids:
        _keep_on(pid, cores[-1:])
    try:
        yield
    finally:
        for pid in (os.getpid(), *pids):
            _keep_on(pid, cores)


def _keep_on(pid: int, cores: Sequence[int]) -> None:
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task), cores)
