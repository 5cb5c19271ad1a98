"""A store buffer's answer to a peer that has a value to be stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynckv.buffers.arriving_parts import ArrivingParts, hear_arriving
from asynckv.buffers.serve_insert import answer
from asynckv.buffers.values.ledger import PendingPut
from asynckv.buffers.waiting_bytes import REQUEST_NBYTES
from asynckv.errors import ChecksumError, PeerLost, RemoteProtocolError
from asynckv.links.requests import LinkStream
from asynckv.protocol.digests import digest_of
from asynckv.protocol.frames import Frame, Put
from asynckv.tensors.runs import fill
from asynckv.tensors.views import dtype_of

if TYPE_CHECKING:
    from asynckv.buffers.serve_store import StoreService

__all__ = ("ServedPut",)


class ServedPut:
    """One remote put: received straight into the store's memory."""

    def __init__(
        self, service: StoreService, stream: LinkStream, frame: Put, body: bytes
    ) -> None:
        if frame.spec is None or frame.inline != (frame.spec.nbytes == len(body)):
            raise RemoteProtocolError("a put's body is not the tensor it declares")
        try:
            dtype_of(frame.spec.dtype)
        except ValueError as exc:
            raise RemoteProtocolError(str(exc)) from exc
        self._service = service
        self._stream = stream
        self._frame = frame
        self._spec = frame.spec
        # What rode along in vain is asked for by payload once there is room.
        fits = frame.inline and service.kept.inserts.fits(REQUEST_NBYTES + len(body))
        self._inline = body if fits else None
        nbytes = REQUEST_NBYTES + (len(body) if fits else 0)
        service.link.payload.announce(frame.transfer)
        self._arriving: ArrivingParts | None = None
        self._digest = b""
        self._task = service.run(self._run, f"put of {frame.key}", nbytes)
        self._task.add_done_callback(lambda task: answer(stream, task))

    def on_frame(self, frame: Frame, body: bytes) -> None:
        hear_arriving(self._task, self._arriving, frame, body)

    def on_lost(self, error: PeerLost) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        store, link = self._service.buffer, self._service.link
        pending = await store.reserve(self._frame.key, self._spec, link.fingerprint)
        try:
            store.commit(pending, await self._fill(pending))
        finally:
            try:
                if self._arriving is not None:
                    await self._arriving.quiesce()
            finally:  # also if it was cancelled again meanwhile
                store.discard(pending)

    async def _fill(self, pending: PendingPut) -> bytes:
        if self._inline is not None:
            return self._take_inline(self._inline, pending)
        part = pending.region, self._spec
        self._arriving = ArrivingParts(
            *(self._stream, self._frame.transfer, [part]),
            *(self._service.buffer.pool, None, self._landed),
        )
        await self._arriving.arrive()
        return self._digest

    def _take_inline(self, body: bytes, pending: PendingPut) -> bytes:
        digest = digest_of(body)
        if self._frame.digest and self._frame.digest != digest:
            raise ChecksumError(f"{self._frame.key!r} changed on its way")
        fill(pending.region.memory(), memoryview(body))
        return digest

    def _landed(self, index: int, digest: bytes) -> None:
        self._digest = digest
