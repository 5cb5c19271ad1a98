"""Processes of tests, forked from one that has imported what all of them need.

A fresh interpreter takes seconds of a core to import torch, a fork milliseconds. The
server has imported, and run nothing: what has run torch cannot be forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Final

import msgspec

import asynckv
from harness import fake_devices, fake_gpus

__all__ = ("Fork", "ForkServer", "fork_server", "main")

_ORDER_BYTES: Final = 2**17
_IMPORTED: Final = (fake_devices, fake_gpus)


class _Order(msgspec.Struct, frozen=True):
    code: str
    arguments: tuple[str, ...]
    environ: dict[str, str]
    prints_errors: bool


class Fork:
    """One of them. Its pid is its own until the block that runs it is left."""

    def __init__(
        self,
        pid: int,
        talk: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        ended: asyncio.StreamReader,
    ) -> None:
        self.pid = pid
        self.stdout, self.stdin = talk
        self._ended = ended
        self._status: int | None = None

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Wait for its end; return its status, or the negative signal that ended it."""
        if self._status is None:
            self._status = int(await self._ended.readline())
        return self._status


class ForkServer:
    """Forks processes that run code of tests."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders

    @contextlib.asynccontextmanager
    async def running(
        self, code: str, *args: str, prints_errors: bool = False
    ) -> AsyncIterator[Fork]:
        """Run ``code``; leaving kills it, if it still runs, and waits for its end.

        ``args`` are in its ``sys.argv``, from 1 on; its standard input and output, and
        its errors if it ``prints_errors``, are those of the :class:`Fork`.
        """
        (talk, theirs), (notes, watched) = socket.socketpair(), socket.socketpair()
        with theirs, watched:
            order = _Order(code, args, dict(os.environ), prints_errors)
            ends = [theirs.fileno(), watched.fileno()]
            socket.send_fds(self._orders, [msgspec.json.encode(order)], ends)
        reader, watching = await asyncio.open_connection(sock=notes)
        talking = await asyncio.open_connection(sock=talk)
        fork = Fork(int(await reader.readline()), talking, reader)
        try:
            yield fork
        finally:
            fork.kill()
            await fork.wait()
            for writer in (talking[1], watching):
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    async def printed_by(self, code: str, *args: str) -> str:
        """Run ``code`` to its end; return what it printed, with its errors."""
        async with self.running(code, *args, prints_errors=True) as fork:
            return (await fork.stdout.read()).decode()


@contextlib.contextmanager
def fork_server() -> Iterator[ForkServer]:
    """Start one; it ends with the block."""
    orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "harness.forks"]
    with theirs:
        process = subprocess.Popen(command, stdin=theirs.fileno())
    with process, orders:
        yield ForkServer(orders)
        orders.close()


def main() -> str:
    """Fork until nobody orders any more; return code only where it is to be run."""
    for name in asynckv.__all__:
        getattr(asynckv, name)
    with socket.socket(fileno=os.dup(0)) as orders:
        while True:
            data, descriptors, _, _ = socket.recv_fds(orders, _ORDER_BYTES, 2)
            if not data:
                return ""
            order = msgspec.json.decode(data, type=_Order)
            if watcher := os.fork():
                for descriptor in descriptors:
                    os.close(descriptor)
                os.waitpid(watcher, 0)
            elif os.fork():
                os._exit(0)
            elif _is_watched(*descriptors):
                break
    if order.prints_errors:
        os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(order.environ)
    sys.argv[1:] = order.arguments
    return order.code


def _is_watched(talk: int, notes: int) -> bool:
    """Fork once more: the one is to be run, and the other tells how that one ended."""
    if pid := os.fork():
        os.close(talk)
        with socket.socket(fileno=notes) as told:
            told.sendall(f"{pid}\n".encode())
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            is_killed = ended.si_code != os.CLD_EXITED
            status = -ended.si_status if is_killed else ended.si_status
            with contextlib.suppress(ConnectionError):
                told.sendall(f"{status}\n".encode())
                told.recv(1)  # until nobody has a use for its pid
        os._exit(0)
    os.close(notes)
    for standard in (0, 1):
        os.dup2(talk, standard)
    os.close(talk)
    return True


if __name__ == "__main__":
    if _code := main():
        exec(_code, {"__name__": "__main__"})  # noqa: S102
