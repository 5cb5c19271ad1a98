"""The serving side of one remote ``insert``."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from asynckv.buffers.arriving_parts import ArrivingParts, hear_arriving
from asynckv.buffers.contents import check_names
from asynckv.buffers.entries.admission import Landed
from asynckv.buffers.entries.entries import Draft, StoredEntry
from asynckv.buffers.manifest import Manifest, unpack, verify_inline
from asynckv.buffers.part_landing import PartLanding, lift_landed
from asynckv.buffers.queries import check_mask, check_tokens
from asynckv.buffers.waiting_bytes import REQUEST_NBYTES
from asynckv.errors import (
    AsyncKVError,
    PeerLost,
)
from asynckv.links.requests import LinkStream
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import (
    Accepted,
    Cancelled,
    Frame,
    Insert,
)
from asynckv.tensors.arena import Region
from asynckv.types import TensorSpec

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
        self._arriving: ArrivingParts | None = None
        self._task = service.run_insert(self._run, frame.entry_id, nbytes)
        self._task.add_done_callback(lambda task: answer(stream, task))

    async def fill(self, entry: StoredEntry, landed: Landed) -> None:
        parts = [
            (part.region, part.spec) for part in entry.parts if part.region is not None
        ]
        if self._inline is not None:
            await self._take_inline(self._inline, parts, landed)
            return
        if not parts:
            return
        pool, devices = self._service.buffer.pool, self._service.devices
        by_gpu = None
        if devices is not None:
            by_gpu = partial(devices.arrivals, on_gpu=self._frame.on_gpu)
        self._arriving = ArrivingParts(
            *(self._stream, self._frame.transfer, parts, pool),
            *(by_gpu, landed),
        )
        try:
            await self._arriving.arrive()
        finally:
            await self._arriving.quiesce()

    def on_frame(self, frame: Frame, body: bytes) -> None:
        hear_arriving(self._task, self._arriving, frame, body)

    def on_lost(self, error: PeerLost) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        if self._service.predecessors:
            await self._service.after_predecessors()
        digest = self._frame.digest or None
        await self._service.buffer.admission.insert(self._draft, self, digest)

    async def _take_inline(
        self,
        manifest: Manifest,
        parts: list[tuple[Region, TensorSpec]],
        landed: Landed,
    ) -> None:
        digests = verify_inline(manifest)
        pool = self._service.buffer.pool
        landings = [PartLanding(region, spec, pool) for region, spec in parts]
        for landing, piece in zip(landings, manifest.inline, strict=True):
            landing.fill(piece)
        await lift_landed(landings, digests, pool)
        for index, digest in enumerate(digests):
            # As those that come by payload: of a link without digests none is known.
            landed(index, b"" if self._service.link.digest == "off" else digest)


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
