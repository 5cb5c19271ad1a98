"""The serving side of one remote ``insert``."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from asynckv.buffers.admission import Landed
from asynckv.buffers.contents import check_names
from asynckv.buffers.drafts import Draft
from asynckv.buffers.entries import StoredEntry
from asynckv.buffers.manifest import Manifest, unpack, verify_inline
from asynckv.buffers.queries import check_mask, check_tokens
from asynckv.buffers.waiting_bytes import REQUEST_NBYTES
from asynckv.errors import (
    AsyncKVError,
    PeerLost,
    RemoteProtocolError,
)
from asynckv.links.receiving import Reception
from asynckv.links.requests import LinkStream
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Cancelled,
    Frame,
    Insert,
)
from asynckv.protocol.payload_frames import Done, Grant, Riders
from asynckv.tensors.arena import Region
from asynckv.tensors.runs import fill
from asynckv.tensors.views import bytes_of, spec_of

if TYPE_CHECKING:
    from asynckv.buffers.serve_lookup import LookupService

__all__ = ("ServedInsert", "answer", "draft_of", "kept_nbytes")

_RECORD_NBYTES: Final = 512
"""A tensor's name and shape in our memory, beside what the peer says of it."""

logger = logging.getLogger(__name__)


def draft_of(frame: Insert, manifest: Manifest, service: LookupService) -> Draft:
    """Check what a peer says about its entry.

    :raises ValueError: tokens and roi do not fit each other, or a name is none
    """
    specs = manifest.specs
    check_names(specs)
    tokens, roi = manifest.input_tokens, manifest.roi
    if tokens is not None:
        check_tokens(tokens)
    if roi is not None:
        check_mask(roi, tokens)
    return Draft(
        entry_id=frame.entry_id,
        input_tokens=tokens,
        roi=roi,
        specs=specs,
        fingerprint=service.link.fingerprint,
        ttl_s=frame.ttl_s,
        deliveries=frame.deliveries,
        streaming=frame.streaming,
    )


def kept_nbytes(manifest: Manifest, body: bytes) -> int:
    """Return what an insert with this body keeps in memory until it ends."""
    return REQUEST_NBYTES + _RECORD_NBYTES * len(manifest.records) + len(body)


class ServedInsert:
    """One remote insert: the source of its entry's bytes."""

    def __init__(
        self, service: LookupService, stream: LinkStream, frame: Insert, body: bytes
    ) -> None:
        self._service = service
        self._stream = stream
        self._frame = frame
        manifest = unpack(body, inline=frame.inline)
        self._draft = draft_of(frame, manifest, service)
        nbytes = kept_nbytes(manifest, body)
        # What rode along in vain is asked for by payload once there is room.
        fits = frame.inline and service.kept.inserts.fits(nbytes)
        self._inline = manifest if fits else None
        nbytes -= 0 if fits or not frame.inline else manifest.nbytes
        service.link.payload.announce(frame.transfer)
        self._coming: _Coming | None = None
        self._task = service.run_insert(self._run, frame.entry_id, nbytes)
        self._task.add_done_callback(lambda task: answer(stream, task))

    async def fill(self, entry: StoredEntry, landed: Landed) -> None:
        regions = [part.region for part in entry.parts if part.region is not None]
        if self._inline is not None:
            self._take_inline(self._inline, regions, landed)
            return
        if not regions:
            return
        transfer = self._frame.transfer
        self._coming = _Coming(self._service, transfer, entry, landed)
        self._coming.reception.begin()
        self._stream.send(Grant(transfer))
        try:
            await self._coming.whole
            await self._coming.lift()
        finally:
            await self._coming.reception.quiesce()

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Cancel():
                self._task.cancel()
            case Done() | Riders() if self._coming is not None:
                self._coming.reception.on_parts(frame, body)
            case _:
                raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")

    def on_lost(self, error: PeerLost) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        if self._service.predecessors:
            await self._service.after_predecessors()
        digest = self._frame.digest or None
        await self._service.buffer.admission.insert(self._draft, self, digest)

    def _take_inline(
        self, manifest: Manifest, regions: list[Region], landed: Landed
    ) -> None:
        digests = verify_inline(manifest)
        if self._service.link.digest == "off":
            digests = [b""] * len(digests)  # as those that come by payload
        for index, digest in enumerate(digests):
            # At most 64 KiB: what rides with a frame.
            fill(regions[index].memory(), manifest.inline[index])
            landed(index, digest)


class _Coming:
    """The parts of an entry on their way into their regions by payload."""

    def __init__(
        self, service: LookupService, transfer: int, entry: StoredEntry, landed: Landed
    ) -> None:
        link, self._pool = service.link, service.buffer.pool
        regions = [part.region for part in entry.parts if part.region is not None]
        # What is to be on a GPU comes by host memory, and is told of when it is there.
        self._lifted = {
            index: (self._pool.host_empty(part.spec), part.region)
            for index, part in enumerate(entry.parts)
            if part.region is not None and part.region.is_on_device
        }
        self._digests: dict[int, bytes] = {}
        targets = [
            bytes_of(self._lifted[index][0])
            if index in self._lifted
            else region.memory()
            for index, region in enumerate(regions)
        ]
        self.whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reception = Reception(link, transfer, targets, self, has_riders=True)
        self._landed = landed
        self._left = len(regions)

    async def lift(self) -> None:
        """Bring what has come to the GPU that it is to be on."""
        if not self._lifted:
            return
        copies = [copy for copy, _ in self._lifted.values()]
        places = [region.place(spec_of(copy)) for copy, region in self._lifted.values()]
        await self._pool.copy(copies, places)
        for index in self._lifted:
            self._landed(index, self._digests[index])

    def part_verified(self, index: int, digest: bytes) -> None:
        if index in self._lifted:
            self._digests[index] = digest
        else:
            self._landed(index, digest)
        self._left -= 1
        if not self._left and not self.whole.done():
            self.whole.set_result(None)

    def reception_failed(self, error: Exception) -> None:
        if not self.whole.done():
            self.whole.set_exception(error)
            self.whole.exception()  # the insert may have been cancelled meanwhile


def answer(stream: LinkStream, task: asyncio.Task[None]) -> None:
    """Send a request's last frame when its task is over."""
    error = None if task.cancelled() else task.exception()
    if task.cancelled():
        stream.send(Cancelled())
    elif error is None:
        stream.send(Accepted())
    else:
        if not isinstance(error, (AsyncKVError, ValueError)):
            logger.error("a request failed by a fault of ours", exc_info=error)
        stream.send(to_failure(error))
    stream.close()
