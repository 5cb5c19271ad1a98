"""A lookup buffer's answers to one peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from asynckv.buffers.entries.entries import EntryState
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serving.devices import DeviceService, Showing
from asynckv.buffers.serving.insert import ServedInsert, ServedWriter
from asynckv.buffers.serving.limits import REQUEST_NBYTES, LinkBytes
from asynckv.buffers.serving.select import ServedSelect, query_of
from asynckv.errors import BufferClosed, PeerLost, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.links.requests import LinkStream, StreamHandler
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import (
    Cancel,
    Cancelled,
    Frame,
    Insert,
    OpeningFrame,
    Peek,
    Result,
    Select,
    Settle,
    Taken,
    Withdraw,
)
from asynckv.protocol.transfer_frames import OpenIpc, OpenMap
from asynckv.sharing.owner import MapDigest
from asynckv.transfers.host_copies import Hoisting
from asynckv.transfers.queries import TOKEN_NBYTES

__all__ = ("Answered", "LookupService")


class Answered:
    """The handler of a request that was answered at once."""

    def on_frame(self, frame: Frame, body: bytes) -> None:
        """A Cancel may have crossed the answer."""

    def on_lost(self, error: PeerLost) -> None:
        """Nothing is left to do."""


class _ServedTaken:
    """A peer waits for the end of an entry."""

    def __init__(self, service: LookupService, stream: LinkStream, entry: str) -> None:
        self._kept = service.kept.queries
        self._stream = stream
        self._kept.take(REQUEST_NBYTES)
        try:
            self._gone = service.buffer.ledger.book.when_gone(entry)
        except BaseException:
            self._kept.give(REQUEST_NBYTES)
            raise
        self._gone.add_done_callback(self._answer)

    def on_frame(self, frame: Frame, body: bytes) -> None:
        if not isinstance(frame, Cancel):
            raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")
        self._gone.cancel()

    def on_lost(self, error: PeerLost) -> None:
        self._gone.cancel()

    def _answer(self, gone: asyncio.Future[None]) -> None:
        self._kept.give(REQUEST_NBYTES)
        if gone.cancelled():
            self._stream.send(Cancelled())
        elif (error := gone.exception()) is not None:
            self._stream.send(to_failure(error))
        else:
            self._stream.send(Result(1))
        self._stream.close()


class LookupService:
    """Answers the requests that one link makes of ``buffer``.

    ``kept`` is charged for what they keep while they are open. ``showing`` is what
    the peer is shown of the buffer's memory, and compares a ``map_digest`` of;
    ``devices`` connects its GPU with the buffer's.
    """

    def __init__(
        self,
        buffer: LookupBuffer,
        link: Link,
        kept: LinkBytes,
        devices: DeviceService,
        map_digest: MapDigest = "edges",
    ) -> None:
        self.devices = devices
        self.showing = Showing(link, buffer.sharing, map_digest)
        self.buffer = buffer
        self.link = link
        self.kept = kept
        self.leases = buffer.ledger.leases
        self.loop = asyncio.get_running_loop()
        self.deliveries: set[ServedSelect] = set()
        self.selects: set[ServedSelect] = set()
        self.predecessors: tuple[LookupService, ...] = ()
        self.is_leaving = False
        self._charged_bytes = 0
        self.hoisting = Hoisting(buffer.pool, devices.copies, link.payload.feeds)
        self._inserts: dict[asyncio.Task[None], tuple[str, int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended_callback: Callable[[], None] | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing is under way for this peer; what waits for room is not."""
        entries = self.buffer.ledger.book.entries
        return not self.deliveries and all(
            (entry := entries.get(entry_id)) is not None
            and entry.state is EntryState.WAITING
            for entry_id, _ in self._inserts.values()
        )

    @property
    def has_ended(self) -> bool:
        """No task of this peer is left."""
        return not self._tasks

    def call_when_ended(self, callback: Callable[[], None]) -> None:
        """Call back each time that the last task of this peer has ended."""
        self._ended_callback = callback

    def open(
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> StreamHandler | None:
        """Answer a request; ``None`` if it is none of a lookup buffer's."""
        match frame:
            case Select():
                self._check_open()
                query = query_of(frame, body)
                nbytes = REQUEST_NBYTES + len(body)
                self.kept.queries.take(nbytes)
                consumer = self.link.peer.id
                select = ServedSelect(self, consumer, frame.stream, stream, nbytes)
                self.selects.add(select)
                select.select(query)
                return select
            case Insert():
                self._check_open()
                kind = ServedWriter if frame.streaming else ServedInsert
                return kind(self, stream, frame, body)
            case Peek():
                return self._answer(stream, self._peek(body))
            case Withdraw(entry_id=entry_id):
                return self._answer(stream, self.buffer.ledger.withdraw(entry_id))
            case Settle(entry_id=entry_id, token=token):
                book = self.buffer.ledger.book
                return self._answer(stream, book.was_acknowledged(entry_id, token))
            case OpenMap() | OpenIpc():
                return self.showing.open(stream, frame)
            case Taken(entry_id=entry_id):
                return _ServedTaken(self, stream, entry_id)
            case _:
                return None

    def run(
        self, coroutine: Coroutine[Any, Any, None], name: str
    ) -> asyncio.Task[None]:
        """Own a task of one request."""
        task = self.loop.create_task(coroutine, name=f"asynckv: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def run_insert(
        self,
        run: Callable[[], Coroutine[Any, Any, None]],
        entry_id: str,
        nbytes: int,
    ) -> asyncio.Task[None]:
        """Own the task of one insert, which keeps so many bytes until it ends.

        :raises Overloaded: they cannot be kept; nothing was begun
        """
        self.kept.inserts.take(nbytes)
        task = self.run(run(), f"insert of {entry_id}")
        self._inserts[task] = entry_id, nbytes
        return task

    async def after_predecessors(self) -> None:
        """Wait until nothing of the peer's link before this one is left.

        What was sent again would else meet itself. Bounded: it was cancelled.
        """
        for service in self.predecessors:
            await service.wait_ended()
        self.predecessors = ()

    def leave(self) -> None:
        """Begin nothing new. What is under way goes on."""
        self.is_leaving = True
        for select in list(self.selects):
            select.wait_no_longer()

    def may_charge(self, nbytes: int) -> bool:
        """Can the peer's receive bound, and ours, take bytes that have no room?"""
        bound = self.link.peer_limits.max_receive_bytes
        memory = self.buffer.ledger.book.memory
        return self._charged_bytes + nbytes <= bound and memory.may_place_outside(
            nbytes
        )

    def charge(self, nbytes: int) -> None:
        """Charge the peer for such bytes; a negative number gives back."""
        self._charged_bytes += nbytes
        if nbytes < 0:
            self.buffer.ledger.offer_waiting_soon()

    def tell_idle(self) -> None:
        """Something ended: let who waits for the end of all look again."""
        self.buffer.room.change()

    async def wait_idle(self) -> None:
        """Wait until nothing is under way. Cancelling leaves no trace."""
        await self.buffer.room.until(lambda: self.is_idle)

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
        _, nbytes = self._inserts.pop(task, ("", 0))
        self.kept.inserts.give(nbytes)
        if self.is_leaving:
            self.tell_idle()
        if self._ended_callback is not None and self.has_ended:
            self._ended_callback()

    def _answer(self, stream: LinkStream, value: int) -> StreamHandler:
        stream.send(Result(int(value)))
        stream.close()
        return Answered()

    def _peek(self, key: bytes) -> int:
        if len(key) % TOKEN_NBYTES:
            raise RemoteProtocolError(f"a key of {len(key)} bytes is no list of tokens")
        return self.leases.peek(key, self.link.fingerprint)

    def _check_open(self) -> None:
        if self.is_leaving:
            raise BufferClosed("the server is leaving; it takes no new requests")
        if self.leases.is_closed:
            raise BufferClosed("the buffer is closed")
