"""The control connection inside one process: the same bytes, through the loop."""

from __future__ import annotations

import asyncio
import collections

from asynckv.links.streams import ControlStream, StreamOwner

__all__ = ("MemoryStream",)


class MemoryStream(ControlStream):
    """One end of a pair; what one writes, the other receives a tick later."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._owner: StreamOwner | None = None
        self._other: MemoryStream = self
        # What the other end wrote and this one has not received; None ends it.
        self._inbox: collections.deque[bytes | None] = collections.deque()
        self._paused = True
        self._closed = False
        self._finished = False
        self._delivery: asyncio.Handle | None = None

    @classmethod
    def pair(cls, loop: asyncio.AbstractEventLoop) -> tuple[MemoryStream, MemoryStream]:
        """Return two connected ends."""
        one, two = cls(loop), cls(loop)
        one._other, two._other = two, one
        return one, two

    def start(self, owner: StreamOwner) -> None:
        self._owner = owner
        self.resume_reading()

    def write(self, data: bytes) -> None:
        if not self._closed and not self._finished:
            self._other._accept(data)

    def finish(self) -> None:
        if not self._closed and not self._finished:
            self._finished = True
            self._other._accept(None)

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._deliver_soon()

    def abort(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._owner = None
        self._inbox.clear()
        self._other.unsent_bytes = 0
        if self._delivery is not None:
            self._delivery.cancel()
        if not self._finished:
            self._other._accept(None)

    def _accept(self, data: bytes | None) -> None:
        if self._closed:
            return
        self._inbox.append(data)
        self._other.unsent_bytes += len(data or b"")
        self._deliver_soon()

    def _deliver_soon(self) -> None:
        if self._inbox and self._delivery is None and not self._paused:
            self._delivery = self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._delivery = None
        while self._inbox and not self._paused and self._owner is not None:
            data = self._inbox.popleft()
            if data is None:
                self._owner.on_end(None)
                return
            self._other.unsent_bytes -= len(data)
            self._other.sent_bytes += len(data)
            self._owner.on_bytes(data)
        if not self._other.unsent_bytes and self._other._owner is not None:
            self._other._owner.on_writable()
