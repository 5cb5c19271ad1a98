"""A process that has imported everything and run none of it, and forks children.

Started as ``python -m harness.crashes.forkserver``; reads an order a line,
and ends with its standard input, killing what it forked. A fresh interpreter
would need seconds for its imports; a process that has run torch cannot be forked.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import traceback
from typing import Any, Final

import msgspec
import torch

from harness.crashes.orders import Order, Report, Word
from harness.crashes.workers import Worker

__all__ = ("main",)

_READ_BYTES: Final = 64 * 1024


class _ForkServer:
    def __init__(self) -> None:
        self._children: set[int] = set()
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker)

    def serve(self) -> None:
        pending = b""
        while True:
            ready, _, _ = select.select([0, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, _READ_BYTES)
                self._reap()
            if 0 in ready:
                data = os.read(0, _READ_BYTES)
                if not data:
                    break
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._fork(msgspec.json.decode(line, type=Order))
        for child in self._children:
            os.kill(child, signal.SIGKILL)
        while self._children:
            child, _ = os.waitpid(-1, 0)
            self._children.discard(child)

    def _fork(self, order: Order) -> None:
        pid = os.fork()
        if pid:
            self._children.add(pid)
            _notify(pid, "pid", order.name)
            return
        status = 1
        try:
            self._become(order)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _become(self, order: Order) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (0, self._woken, self._waker):
            os.close(descriptor)
        torch.set_num_threads(1)
        options: dict[str, Any] = dict(order.options)
        try:
            asyncio.run(Worker(order, options).work())
        except BaseException:
            traceback.print_exc()
            raise

    def _reap(self) -> None:
        while self._children:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            self._children.discard(child)
            _notify(child, "gone", number=status)


def _notify(pid: int, word: Word, name: str = "", number: int = 0) -> None:
    line = msgspec.json.encode(Report(pid, word, name, number))
    os.write(1, line + b"\n")


def main() -> None:
    """Serve orders until standard input ends."""
    _ForkServer().serve()


if __name__ == "__main__":
    main()
