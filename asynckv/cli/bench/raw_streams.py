"""The baseline of several lanes: as many raw sockets, a thread for each.

Everything in this file blocks; the bench calls it in a thread of its own.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Sequence

from asynckv.cli.bench.raw import RawConnection

__all__ = ("RawStreams", "name_of_streams")


def name_of_streams(count: int) -> str:
    """Say plainly how many there are.

    >>> name_of_streams(1), name_of_streams(4)
    ('raw TCP, 1 stream', 'raw TCP, 4 streams')
    """
    return f"raw TCP, {count} stream{'' if count == 1 else 's'}"


class RawStreams:
    """Connections to the same process that share out the parts of a transfer.

    Threads are made when they are needed first, and end when this is closed.
    """

    def __init__(self, host: str, port: int, token: bytes, count: int) -> None:
        self._connections: list[RawConnection] = []
        self._threads = concurrent.futures.ThreadPoolExecutor(count, "raw stream")
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            for _ in range(count):
                self._connections.append(RawConnection(host, port, token))
            stack.pop_all()

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def first(self) -> RawConnection:
        """The one for everything that needs but one."""
        return self._connections[0]

    def pull(self, targets: Sequence[memoryview], streams: int) -> float:
        """Receive parts of equal size over so many streams; return the seconds.

        Each stream takes its parts one by one. Whatever happens, no thread
        touches a target any more afterwards.

        :raises OSError: the peer hung up on one of them
        """
        if streams == 1:
            return self.first.pull(targets)
        began_s = time.perf_counter()
        shares = [
            self._threads.submit(one.pull, targets[number::streams])
            for number, one in enumerate(self._connections[:streams])
        ]
        concurrent.futures.wait(shares)
        for share in shares:
            share.result()
        return time.perf_counter() - began_s

    def close(self) -> None:
        """Hang up. Never waits; a call that waits ends with an error."""
        for connection in self._connections:
            connection.close()
        self._threads.shutdown(wait=False)
