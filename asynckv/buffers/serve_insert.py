"""The serving side of remote inserts: whole entries, and tensor by tensor."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from asynckv.buffers.admission import Landed
from asynckv.buffers.contents import check_names
from asynckv.buffers.drafts import Draft
from asynckv.buffers.entries import EntryState, StoredEntry
from asynckv.buffers.manifest import Manifest, unpack, verify_inline
from asynckv.buffers.queries import check_mask, check_tokens
from asynckv.errors import (
    AsyncKVError,
    ChecksumError,
    EntryAborted,
    PeerLost,
    RemoteProtocolError,
)
from asynckv.links.receiving import Reception
from asynckv.links.requests import LinkStream
from asynckv.protocol.digests import digest_of
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Cancelled,
    Commit,
    Done,
    Frame,
    Grant,
    Insert,
    Push,
    Retract,
)
from asynckv.tensors.arena import Region

if TYPE_CHECKING:
    from asynckv.buffers.serve_lookup import LookupService

__all__ = ("SILENCE_S", "ServedInsert", "ServedWriter", "answer", "draft_of")

logger = logging.getLogger(__name__)

SILENCE_S: Final = 30.0
"""A writer that puts nothing for as long, on a live link, has failed."""


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


class ServedInsert:
    """One remote insert: the source of its entry's bytes."""

    def __init__(
        self, service: LookupService, stream: LinkStream, frame: Insert, body: bytes
    ) -> None:
        self._service = service
        self._stream = stream
        self._frame = frame
        self._manifest = unpack(body, inline=frame.inline)
        self._draft = draft_of(frame, self._manifest, service)
        service.link.payload.announce(frame.transfer)
        self._reception: Reception | None = None
        self._landed: Landed | None = None
        self._left = 0
        self._whole: asyncio.Future[None] | None = None
        self._task = service.run_insert(self._run(), frame.entry_id)
        self._task.add_done_callback(lambda task: answer(stream, task))

    async def fill(self, entry: StoredEntry, landed: Landed) -> None:
        regions = [part.region for part in entry.parts if part.region is not None]
        if self._frame.inline or not regions:
            self._take_inline(regions, landed)
            return
        self._landed, self._left = landed, len(regions)
        self._whole = asyncio.get_running_loop().create_future()
        self._reception = Reception(
            self._service.link,
            self._frame.transfer,
            [region.view() for region in regions],
            self,
        )
        self._reception.begin()
        self._stream.send(Grant(self._frame.transfer))
        try:
            await self._whole
        finally:
            await self._reception.quiesce()

    def _take_inline(self, regions: list[Region], landed: Landed) -> None:
        digests = verify_inline(self._manifest)
        if self._service.link.digest == "off":
            digests = [b""] * len(digests)  # as those that come by payload
        for index, digest in enumerate(digests):
            _copy(self._manifest.inline[index], regions[index])
            landed(index, digest)

    async def _run(self) -> None:
        if self._service.predecessors:
            await self._service.after_predecessors()
        digest = self._frame.digest or None
        await self._service.buffer.admission.insert(self._draft, self, digest)

    def part_verified(self, index: int, digest: bytes) -> None:
        if self._landed is not None:
            self._landed(index, digest)
        self._left -= 1
        if not self._left and self._whole is not None and not self._whole.done():
            self._whole.set_result(None)

    def reception_failed(self, error: Exception) -> None:
        if self._whole is not None and not self._whole.done():
            self._whole.set_exception(error)
            self._whole.exception()  # the insert may have been cancelled meanwhile

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Cancel():
                self._task.cancel()
            case Done() if self._reception is not None:
                self._reception.on_done(frame)
            case _:
                raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")

    def on_lost(self, error: PeerLost) -> None:
        self._task.cancel()


class _Pushed:
    """One tensor of a streaming insert, on its way into its region."""

    def __init__(self, writer: ServedWriter, index: int) -> None:
        self.index = index
        self.reception: Reception | None = None
        self._writer = writer

    def part_verified(self, index: int, digest: bytes) -> None:
        self._writer.landed(self.index, digest)

    def reception_failed(self, error: Exception) -> None:
        self._writer.fail(error)


class ServedWriter:
    """One remote ``open_insert``: tensors come one by one, each granted."""

    def __init__(
        self, service: LookupService, stream: LinkStream, frame: Insert, body: bytes
    ) -> None:
        self._service = service
        self._stream = stream
        self._frame = frame
        self._draft = draft_of(frame, unpack(body, inline=False), service)
        self._entry: StoredEntry | None = None
        self._pushed: dict[int, _Pushed] = {}
        self._retracted: dict[int, list[Reception]] = {}
        self._to_grant: set[int] = set()
        self._verified: set[int] = set()
        self._committed = False
        self._ended: asyncio.Future[None] = service.loop.create_future()
        self._silence: asyncio.TimerHandle | None = None
        self._landed_bytes: dict[int, int] = {}
        self._task = service.run_insert(self._run(), frame.entry_id)
        self._task.add_done_callback(lambda task: answer(stream, task))

    def landed(self, index: int, digest: bytes) -> None:
        """One part is verified."""
        self._hear()
        self._verified.add(index)
        if self._entry is not None:
            self._service.buffer.ledger.landed(self._entry, index, digest)
        self._end_if_whole()

    def fail(self, error: Exception) -> None:
        """The writer cannot go on."""
        if not self._ended.done():
            self._end_with(error)

    def on_frame(self, frame: Frame, body: bytes) -> None:
        self._hear()
        match frame:
            case Push():
                self._on_push(frame, body)
            case Done(transfer=transfer) if transfer in self._pushed:
                reception = self._pushed[transfer].reception
                if reception is not None:
                    reception.on_done(frame)
            case Retract(transfer=transfer):
                self._on_retract(transfer)
            case Commit():
                self._committed = True
                self._end_if_whole()
            case Cancel():
                self._task.cancel()
            case Done():
                pass  # of a push that was retracted meanwhile
            case _:
                raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")

    def on_lost(self, error: PeerLost) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        admission = self._service.buffer.admission
        self._entry = entry = await admission.begin(self._draft)
        try:
            self._stream.send(Grant(self._frame.transfer))
            self._hear()
            await self._ended
        except BaseException:
            admission.abort(entry)
            raise
        finally:
            self._ended.cancel()
            if self._silence is not None:
                self._silence.cancel()
            await self._quiesce()
        await admission.finish(entry)

    def _on_push(self, frame: Push, body: bytes) -> None:
        entry = self._entry
        if entry is None or frame.part >= len(entry.parts):
            raise RemoteProtocolError("a tensor was pushed that was never granted")
        if frame.part in self._verified or self._is_coming(frame.part):
            raise RemoteProtocolError("a tensor was pushed twice")
        region = entry.parts[frame.part].region
        if entry.state is EntryState.GONE or region is None:
            self._verified.add(frame.part)
            self._stream.send(Retract(frame.transfer))
            self._end_if_whole()
        elif frame.inline:
            self._take_inline(frame, body, region)
        elif frame.part in self._retracted:
            self._to_grant.add(frame.transfer)
            self._service.run(self._grant_later(frame, region), "grant of a push")
        else:
            self._grant(frame, region)

    def _take_inline(self, frame: Push, body: bytes, region: Region) -> None:
        if len(body) != region.nbytes:
            raise RemoteProtocolError("a pushed tensor has not its declared size")
        digest = digest_of(body)
        if frame.digest and frame.digest != digest:
            self.fail(ChecksumError("a pushed tensor changed on its way"))
            return
        _copy(memoryview(body), region)
        self.landed(frame.part, digest)

    def _grant(self, frame: Push, region: Region) -> None:
        pushed = _Pushed(self, frame.part)
        pushed.reception = Reception(
            self._service.link, frame.transfer, [region.view()], pushed
        )
        self._pushed[frame.transfer] = pushed
        pushed.reception.begin()
        self._stream.send(Grant(frame.transfer))

    async def _grant_later(self, frame: Push, region: Region) -> None:
        """The same part was being received before: let that end first."""
        for reception in list(self._retracted.get(frame.part, ())):
            await reception.quiesce()
        if frame.transfer in self._to_grant and not self._ended.done():
            self._to_grant.remove(frame.transfer)
            self._retracted.pop(frame.part, None)
            self._grant(frame, region)

    def _on_retract(self, transfer: int) -> None:
        self._to_grant.discard(transfer)
        pushed = self._pushed.pop(transfer, None)
        if pushed is not None and pushed.reception is not None:
            pushed.reception.stop()
            self._retracted.setdefault(pushed.index, []).append(pushed.reception)

    def _end_if_whole(self) -> None:
        entry = self._entry
        if entry is None or self._ended.done():
            return
        if self._committed and len(self._verified) == len(entry.parts):
            self._ended.set_result(None)
        else:
            self._end_if_gone(entry)

    def _end_if_gone(self, entry: StoredEntry) -> None:
        if entry.state is not EntryState.GONE or self._ended.done():
            return
        if entry.left_by:
            self._end_with(EntryAborted(reason=entry.left_by))
        elif self._committed:
            self._ended.set_result(None)  # acknowledged early: the rest is not needed

    async def _quiesce(self) -> None:
        for pushed in self._pushed.values():
            if pushed.reception is not None:
                await pushed.reception.quiesce()
        for receptions in self._retracted.values():
            for reception in receptions:
                await reception.quiesce()

    def _end_with(self, error: Exception) -> None:
        self._ended.set_exception(error)
        self._ended.exception()  # the writer may have been cancelled meanwhile

    def _is_coming(self, part: int) -> bool:
        return any(pushed.index == part for pushed in self._pushed.values())

    def _hear(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
        if not self._ended.done():
            loop = self._service.loop
            self._silence = loop.call_later(SILENCE_S, self._fall_silent)

    def _fall_silent(self) -> None:
        payload = self._service.link.payload
        landed = {transfer: payload.landed_bytes(transfer) for transfer in self._pushed}
        if landed != self._landed_bytes and any(landed.values()):
            self._landed_bytes = landed
            self._hear()  # a tensor is slow, but it comes
            return
        message = f"no tensor came for {SILENCE_S:.0f} s"
        self.fail(EntryAborted(message, reason="producer"))


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


def _copy(source: memoryview, region: Region) -> None:
    # At most 64 KiB: what rides with a frame.
    region.view()[:] = source
