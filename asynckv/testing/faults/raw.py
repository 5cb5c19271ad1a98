"""Plain connections, for whoever plays a peer by hand: bytes out, bytes in."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import TracebackType
from typing import Self

from asynckv.links.securing import wait_readable
from asynckv.testing.faults.passages import close_with_reset
from asynckv.testing.faults.places import place_of, prepared

__all__ = ("RawConnection", "RawListener")


class RawConnection:
    """One connected stream socket. Closed by ``with``."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = prepared(sock)
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()

    @classmethod
    async def dial(cls, url: str) -> Self:
        """Connect to the listener at ``url``, and say nothing.

        :raises OSError: nobody listens there
        """
        return cls(await place_of(url).connect())

    async def send(self, data: bytes) -> None:
        """Send all of ``data``, with nothing of others in between.

        :raises OSError: the connection has ended
        """
        async with self._sending:
            await self._loop.sock_sendall(self._sock, data)

    def send_nowait(self, data: bytes) -> int:
        """Send what the kernel takes now; return how many bytes that is.

        :raises OSError: the connection has ended
        """
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0

    async def receive(self, nbytes: int) -> bytes:
        """Return ``nbytes``, or what came before the end of the stream.

        :raises OSError: the connection was reset
        """
        data = bytearray()
        while len(data) < nbytes:
            piece = await self._loop.sock_recv(self._sock, nbytes - len(data))
            if not piece:
                break
            data += piece
        return bytes(data)

    async def receive_some(self, max_bytes: int = 2**16) -> bytes:
        """Return what is there, at least a byte; nothing at the end of the stream.

        :raises OSError: the connection was reset
        """
        return await self._loop.sock_recv(self._sock, max_bytes)

    def finish(self) -> None:
        """End the sending half."""
        self._sock.shutdown(socket.SHUT_WR)

    def close(self, *, resets: bool = False) -> None:
        """Hang up, or with ``resets`` break off (RST)."""
        if resets:
            close_with_reset(self._sock)
        else:
            self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class RawListener:
    """Listens at ``url``, a free loopback port, and answers nothing by itself.

    Closed by ``with``, and with it every connection that it has accepted.
    """

    def __init__(self, *, backlog: int = 16) -> None:
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        self._sock.bind(("127.0.0.1", 0))
        self._sock.listen(backlog)
        self.url = "tcp://{}:{}".format(*self._sock.getsockname())
        self._accepted: list[RawConnection] = []

    async def accept(self) -> RawConnection:
        """Return the next connection. A cancelled call has accepted none."""
        while True:
            await wait_readable(self._sock)
            with contextlib.suppress(BlockingIOError):  # who dialled is gone again
                sock, _ = self._sock.accept()
                self._accepted.append(RawConnection(sock))
                return self._accepted[-1]

    def close(self) -> None:
        """Hang up everywhere."""
        self._sock.close()
        for connection in self._accepted:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
