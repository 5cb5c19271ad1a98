"""Processes of tests, forked from one that has imported what all of them need.

A fresh interpreter takes seconds of a core to import torch, a fork milliseconds. The
server has imported, and run nothing: what has run torch cannot be forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Final, TypeAlias

import msgspec

import asynckv
from harness import fake_devices, fake_gpus

__all__ = ("Fork", "ForkServer", "fork_server", "main")

_ORDER_BYTES: Final = 2**17
_IMPORTED: Final = (fake_devices, fake_gpus)
_Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Order(msgspec.Struct, frozen=True):
    code: str
    arguments: tuple[str, ...]
    environ: dict[str, str]


class Fork:
    """One of them. Its pid is its own until the block that runs it is left."""

    def __init__(
        self,
        pid: int,
        talk: _Streams,
        errors: asyncio.StreamReader | None,
        ended: asyncio.StreamReader,
    ) -> None:
        self.pid = pid
        self.stdout, self.stdin = talk
        self.stderr = errors
        self._ended = ended
        self._status: int | None = None

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self.send_signal(signal.SIGKILL)

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
        self,
        code: str,
        *args: str,
        stderr: int | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> AsyncIterator[Fork]:
        """Run ``code``; leaving kills it, if it still runs, and waits for its end.

        ``args`` are in its ``sys.argv``, from 1 on; its standard input and output are
        those of the :class:`Fork`. ``stderr`` is as for :mod:`subprocess`.
        """
        order = msgspec.json.encode(_Order(code, args, dict(environ)))
        async with contextlib.AsyncExitStack() as stack:
            talk, watched = socket.socketpair(), socket.socketpair()
            theirs = [talk[1], watched[1]]
            errors = socket.socketpair() if stderr == subprocess.PIPE else None
            if stderr is not None:
                theirs.append(errors[1] if errors else talk[1])
            with contextlib.ExitStack() as given:
                ends = [given.enter_context(end).fileno() for end in theirs]
                socket.send_fds(self._orders, [order], ends)
            reader, _ = await _opened(watched[0], stack)
            talking = await _opened(talk[0], stack)
            heard = (await _opened(errors[0], stack))[0] if errors else None
            fork = Fork(int(await reader.readline()), talking, heard, reader)
            try:
                yield fork
            finally:
                fork.kill()
                await fork.wait()

    async def printed_by(self, code: str, *args: str) -> str:
        """Run ``code`` to its end; return what it printed, with its errors."""
        async with self.running(code, *args, stderr=subprocess.STDOUT) as fork:
            return (await fork.stdout.read()).decode()


async def _opened(end: socket.socket, stack: contextlib.AsyncExitStack) -> _Streams:
    """Return the streams of one end; leaving ``stack`` closes it."""
    reader, writer = await asyncio.open_connection(sock=end)

    async def close() -> None:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    stack.push_async_callback(close)
    return reader, writer


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
    gc.freeze()  # else each of them looks through all that at its end, and copies it
    with socket.socket(fileno=os.dup(0)) as orders:
        while True:
            data, descriptors, _, _ = socket.recv_fds(orders, _ORDER_BYTES, 3)
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
    # Also where the tests themselves are to end by neither, as with nohup.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order.environ)
    sys.argv[1:] = order.arguments
    return order.code


def _is_watched(talk: int, notes: int, *errors: int) -> bool:
    """Fork once more: the one is to be run, and the other tells how that one ended."""
    if pid := os.fork():
        for descriptor in (talk, *errors):
            os.close(descriptor)
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
    for standard, descriptor in enumerate((talk, talk, *errors)):
        os.dup2(descriptor, standard)
    for descriptor in (talk, *errors):
        os.close(descriptor)
    return True


if __name__ == "__main__":
    if _code := main():
        exec(_code, {"__name__": "__main__"})  # noqa: S102
