"""A store buffer's answer to a peer that wants a value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynckv.buffers.manifest import INLINE_NBYTES, pack
from asynckv.buffers.values.ledger import PinnedValue
from asynckv.buffers.waiting_bytes import REQUEST_NBYTES
from asynckv.errors import PeerLost, RemoteProtocolError
from asynckv.links.requests import LinkStream
from asynckv.protocol.frames import (
    Cancel,
    Cancelled,
    Frame,
    Nack,
    Offer,
    Result,
    Took,
)
from asynckv.protocol.payload_frames import Done, Grant
from asynckv.protocol.values import TensorRecord
from asynckv.tensors.runs import joined

if TYPE_CHECKING:
    from asynckv.buffers.serve_store import StoreService

__all__ = ("ServedGet",)

_BUSY_BYTES = 4 * 2**20
"""With so much unwritten for a peer, the next value waits its turn."""


class ServedGet:
    """One remote get: read from the store's memory, which stays pinned meanwhile."""

    def __init__(
        self, service: StoreService, stream: LinkStream, pinned: PinnedValue
    ) -> None:
        self._service = service
        self._stream = stream
        self._pinned = pinned
        self._transfer = service.link.new_transfer()
        self._is_offered = self._is_sending = False
        service.under_way.add(self)
        self._offer_when_writable()

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Grant() if self._is_offered and not self._is_sending:
                self._send()
            case Took():
                self._end(None)
            case Cancel() | Nack():
                self._end(Cancelled())
            case _:
                raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")

    def on_lost(self, error: PeerLost) -> None:
        self._end(None)

    def _offer_when_writable(self) -> None:
        service, pinned = self._service, self._pinned
        if self not in service.under_way:
            return
        if service.link.outgoing_bytes > _BUSY_BYTES:
            service.link.call_when_drained(self._offer_when_writable)
            return
        self._is_offered = True
        record = TensorRecord("value", pinned.spec, pinned.digest)
        inline = pinned.spec.nbytes <= INLINE_NBYTES
        pieces = [joined(pinned.region.memory())] if inline else []
        body = pack([record], None, None, pieces)
        self._stream.send(Offer(self._transfer, inline), body)
        if inline:
            self._end(Result(1))

    def _send(self) -> None:
        self._is_sending = True
        memory, digest = self._pinned.region.memory(), self._pinned.digest or None
        payload = self._service.link.payload
        payload.send(self._transfer, 0, memory, self._sent, digest=digest)

    def _sent(self, digest: bytes, error: BaseException | None) -> None:
        if error is None:  # or else the link ends
            self._stream.send(Done(self._transfer, 0, digest))

    def _end(self, last: Frame | None) -> None:
        if self._is_sending:
            self._service.link.payload.stop(self._transfer)
        if last is not None:
            self._stream.send(last)
        self._stream.close()
        self._service.buffer.release(self._pinned)
        self._service.kept.queries.give(REQUEST_NBYTES)
        self._service.ended(self)
