"""A lookup buffer's answers to one peer."""

from __future__ import annotations

import asyncio

from asynckv.buffers.serving.insert import ServedInsert, ServedWriter
from asynckv.buffers.serving.requests import LookupRequests
from asynckv.buffers.serving.select import ServedSelect, query_of
from asynckv.buffers.serving.service import REQUEST_NBYTES, answer_at_once
from asynckv.errors import BufferClosed, PeerLost, RemoteProtocolError
from asynckv.links.link import LinkStream
from asynckv.links.streams import StreamHandler
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
from asynckv.protocol.transfer_frames import OpenMemory
from asynckv.transfers.tokens import TOKEN_NBYTES

__all__ = ("LookupService",)


class _ServedTaken:
    """A peer waits for the end of an entry."""

    def __init__(self, service: LookupRequests, stream: LinkStream, entry: str) -> None:
        self._kept = service.kept.queries
        self._stream = stream
        self._kept.take(REQUEST_NBYTES)
        try:
            self._gone = service.buffer.ledger.table.when_gone(entry)
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


class LookupService(LookupRequests):
    """Answers the requests that one link makes of a lookup buffer."""

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
                return answer_at_once(stream, Result(self._peek(body)))
            case Withdraw(entry_id=entry_id):
                was_there = self.buffer.ledger.withdraw(entry_id)
                return answer_at_once(stream, Result(int(was_there)))
            case Settle(entry_id=entry_id, token=token):
                table = self.buffer.ledger.table
                was_acknowledged = table.was_acknowledged(entry_id, token)
                return answer_at_once(stream, Result(int(was_acknowledged)))
            case OpenMemory(of="lookup"):
                return self.export.open(stream, frame, self.run)
            case Taken(entry_id=entry_id):
                return _ServedTaken(self, stream, entry_id)
            case _:
                return None

    def _peek(self, key: bytes) -> int:
        if len(key) % TOKEN_NBYTES:
            raise RemoteProtocolError(f"a key of {len(key)} bytes is no list of tokens")
        return self.leases.peek(key, self.link.fingerprint)

    def _check_open(self) -> None:
        if self.is_draining:
            raise BufferClosed("the server is leaving; it takes no new requests")
        if self.leases.is_closed:
            raise BufferClosed("the buffer is closed")
