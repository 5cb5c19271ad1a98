"""A store buffer's answer to a peer that wants values kept for a while."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asynckv.buffers.waiting_bytes import REQUEST_NBYTES
from asynckv.errors import PeerLost, RemoteProtocolError
from asynckv.links.requests import LinkStream
from asynckv.protocol.frames import Cancel, Cancelled, Frame
from asynckv.protocol.pin_frames import Pinned

if TYPE_CHECKING:
    from asynckv.buffers.serve_store import StoreService

__all__ = ("ServedPin",)


class ServedPin:
    """One peer's hold on some values, until it lets go or is lost.

    It keeps no server from leaving: what is pinned is no request under way.
    """

    def __init__(
        self, service: StoreService, stream: LinkStream, keys: Sequence[str]
    ) -> None:
        fingerprint = service.link.fingerprint
        self._service = service
        self._stream = stream
        self._charged = REQUEST_NBYTES + sum(len(key.encode()) for key in keys)
        service.kept.queries.take(self._charged)
        try:
            self._pinned = service.buffer.hold(keys, fingerprint)
        except BaseException:
            service.kept.queries.give(self._charged)
            raise
        stream.send(Pinned(tuple(pinned is not None for pinned in self._pinned)))

    def on_frame(self, frame: Frame, body: bytes) -> None:
        if not isinstance(frame, Cancel):
            raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")
        self._end()
        self._stream.send(Cancelled())
        self._stream.close()

    def on_lost(self, error: PeerLost) -> None:
        self._end()
        self._stream.close()

    def _end(self) -> None:
        for pinned in self._pinned:
            if pinned is not None:
                self._service.buffer.release(pinned)
        self._pinned = []
        self._service.kept.queries.give(self._charged)
        self._charged = 0
