"""What a receiving half tells its peer: what came, and what there is room for.

Once a tick at most. Plain functions; nothing waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.frames import Flushed, Frame, Read

__all__ = ("Reports",)

_NOTHING: Final = memoryview(b"")


class Reports:
    """Counts what the peer was told, and what it is to be told next.

    It may send what it was told that there is room for; a tensor above ``max_bytes``
    when all of that is free.
    """

    def __init__(
        self, send: Callable[[Frame, memoryview], None], max_bytes: int
    ) -> None:
        self._send = send
        self._max_bytes = max_bytes
        self._credit_bytes = 0
        self._credit_tensors = 0
        self._owed_bytes = 0
        self._owed_tensors = 0
        self._verified_count = 0
        self._reported_count = 0
        self._due: asyncio.Handle | None = None
        self._is_over = False

    def charge(self, nbytes: int) -> None:
        """A tensor of so many bytes comes.

        :raises RemoteProtocolError: the peer was not told that there is room for it
        """
        told_unread = self._max_bytes - self._credit_bytes
        if self._credit_tensors < 1 or (nbytes > self._credit_bytes and told_unread):
            raise RemoteProtocolError("a tensor for which there is no room")
        self._credit_bytes -= nbytes
        self._credit_tensors -= 1

    def owe(self, nbytes: int, tensors: int) -> None:
        """There is room for so many more."""
        self._owed_bytes += nbytes
        self._owed_tensors += tensors
        self._tell_soon()

    def verified(self, tensors: int) -> None:
        """So many more are whole, in their order."""
        self._verified_count += tensors
        self._tell_soon()

    def tell(self) -> None:
        """Say it now."""
        self._forget_due()
        if self._verified_count > self._reported_count:
            self._reported_count = self._verified_count
            self._send(Flushed(self._verified_count), _NOTHING)
        if self._owed_bytes or self._owed_tensors:
            read = Read(self._owed_bytes, self._owed_tensors)
            self._credit_bytes += read.nbytes
            self._credit_tensors += read.tensors
            self._owed_bytes = self._owed_tensors = 0
            self._send(read, _NOTHING)

    def end(self) -> None:
        """Say nothing more, unless :meth:`tell` is called."""
        self._is_over = True
        self._forget_due()

    def _tell_soon(self) -> None:
        if self._due is None and not self._is_over:
            self._due = asyncio.get_running_loop().call_soon(self.tell)

    def _forget_due(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
