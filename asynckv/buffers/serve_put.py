"""A store buffer's answer to a peer that has a value to be stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynckv.buffers.answers import Answer
from asynckv.buffers.part_landing import PartLanding, lift_landed
from asynckv.buffers.serve_insert import answer
from asynckv.buffers.store_ledger import PendingPut
from asynckv.buffers.waiting_bytes import REQUEST_NBYTES
from asynckv.errors import ChecksumError, PeerLost, RemoteProtocolError
from asynckv.links.receiving import Reception
from asynckv.links.requests import LinkStream
from asynckv.protocol.digests import digest_of
from asynckv.protocol.frames import Cancel, Frame, Put
from asynckv.protocol.payload_frames import Done, Grant, Riders
from asynckv.tensors.views import dtype_of

if TYPE_CHECKING:
    from asynckv.buffers.serve_store import StoreService

__all__ = ("ServedPut",)


class ServedPut:
    """One remote put: received straight into the store's memory, but a GPU's."""

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
        self._reception: Reception | None = None
        self._digest: Answer[bytes] = Answer()
        self._task = service.run(self._run, f"put of {frame.key}", nbytes)
        self._task.add_done_callback(lambda task: answer(stream, task))

    def part_verified(self, index: int, digest: bytes) -> None:
        self._digest.give(digest)

    def reception_failed(self, error: Exception) -> None:
        self._digest.fail(error)

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Cancel():
                self._task.cancel()
            case Done() | Riders() if self._reception is not None:
                self._reception.on_parts(frame, body)
            case _:
                raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")

    def on_lost(self, error: PeerLost) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        store, link = self._service.buffer, self._service.link
        pending = await store.reserve(self._frame.key, self._spec, link.fingerprint)
        try:
            store.commit(pending, await self._fill(pending))
        finally:
            try:
                if self._reception is not None:
                    await self._reception.quiesce()
            finally:  # also if it was cancelled again meanwhile
                store.discard(pending)

    async def _fill(self, pending: PendingPut) -> bytes:
        pool = self._service.buffer.pool
        landing = PartLanding(pending.region, self._spec, pool)
        digest = await self._receive(landing)
        await lift_landed([landing], [digest], pool)
        return digest

    async def _receive(self, landing: PartLanding) -> bytes:
        if self._inline is not None:
            digest = digest_of(self._inline)
            if self._frame.digest and self._frame.digest != digest:
                raise ChecksumError(f"{self._frame.key!r} changed on its way")
            landing.fill(memoryview(self._inline))
            return digest
        self._reception = Reception(
            self._service.link,
            self._frame.transfer,
            [landing.memory],
            self,
            has_riders=True,
        )
        self._reception.begin()
        self._stream.send(Grant(self._frame.transfer))
        return await self._digest
