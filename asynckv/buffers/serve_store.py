"""A store buffer's answers to one peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from asynckv.buffers.serve_get import ServedGet
from asynckv.buffers.serve_lookup import Answered
from asynckv.buffers.serve_pins import ServedPin
from asynckv.buffers.serve_put import ServedPut
from asynckv.buffers.store import StoreBuffer
from asynckv.buffers.values.ledger import PinnedValue
from asynckv.buffers.waiting_bytes import REQUEST_NBYTES, LinkBytes
from asynckv.errors import BufferClosed
from asynckv.links.link import Link
from asynckv.links.requests import LinkStream, StreamHandler
from asynckv.protocol.frames import Contains, Delete, Get, OpeningFrame, Put, Result
from asynckv.protocol.pin_frames import Pin

__all__ = ("StoreService",)


class StoreService:
    """Answers the requests that one link makes of ``buffer``.

    ``kept`` is charged for what they keep while they are open.
    """

    def __init__(self, buffer: StoreBuffer, link: Link, kept: LinkBytes) -> None:
        self.buffer = buffer
        self.link = link
        self.kept = kept
        self.loop = asyncio.get_running_loop()
        self.is_leaving = False
        self.under_way: set[object] = set()
        self._idle: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended_callback: Callable[[], None] | None = None

    def open(
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> StreamHandler | None:
        """Answer a request; ``None`` if it is none of a store buffer's."""
        fingerprint = self.link.fingerprint
        if not isinstance(frame, Put | Get | Delete | Contains | Pin):
            return None
        if self.is_leaving:
            raise BufferClosed("the server is leaving; it takes no new requests")
        match frame:
            case Put(spec=None, key=key) | Delete(key=key):
                was_there = self.buffer.remove(key, fingerprint)
                return self._answer(stream, Result(int(was_there)))
            case Put():
                return ServedPut(self, stream, frame, body)
            case Get(key=key):
                pinned = self._lookup(key)
                if pinned is None:
                    return self._answer(stream, Result(0))
                return ServedGet(self, stream, pinned)
            case Pin():
                return ServedPin(self, stream, frame.keys)
            case _:
                flags = self.buffer.has(frame.keys, fingerprint)
                return self._answer(stream, Result(sum(flags), flags))

    def run(
        self, run: Callable[[], Coroutine[Any, Any, None]], name: str, nbytes: int
    ) -> asyncio.Task[None]:
        """Own a task of one request, which keeps so many bytes until it ends.

        :raises Overloaded: they cannot be kept; nothing was begun
        """
        self.kept.inserts.take(nbytes)
        task = self.loop.create_task(run(), name=f"asynckv: {name}")
        self._tasks.add(task)
        task.add_done_callback(lambda _: self.kept.inserts.give(nbytes))
        self.under_way.add(task)
        task.add_done_callback(self.ended)
        task.add_done_callback(self._task_ended)
        return task

    def ended(self, request: object) -> None:
        """One request is over."""
        self.under_way.discard(request)
        if not self.under_way and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    @property
    def has_ended(self) -> bool:
        """No task of this peer is left."""
        return not self._tasks

    def call_when_ended(self, callback: Callable[[], None]) -> None:
        """Call back each time that the last task of this peer has ended."""
        self._ended_callback = callback

    def leave(self) -> None:
        """Begin nothing new. What is under way goes on."""
        self.is_leaving = True

    async def wait_idle(self) -> None:
        """Wait until nothing is under way. Cancelling leaves no trace."""
        while self.under_way:
            self._idle = self.loop.create_future()
            await self._idle

    def abort(self) -> None:
        """End what is under way. Never waits."""
        for task in self._tasks:
            task.cancel()

    async def wait_ended(self) -> None:
        """Wait for the tasks of an aborted service."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._ended_callback is not None and self.has_ended:
            self._ended_callback()

    def _lookup(self, key: str) -> PinnedValue | None:
        """Return what is stored as ``key``, and charge for it if something is."""
        pinned = None
        self.kept.queries.take(REQUEST_NBYTES)
        try:
            pinned = self.buffer.lookup(key, self.link.fingerprint)
        finally:
            if pinned is None:
                self.kept.queries.give(REQUEST_NBYTES)
        return pinned

    def _answer(self, stream: LinkStream, last: Result) -> StreamHandler:
        stream.send(last)
        stream.close()
        return Answered()
