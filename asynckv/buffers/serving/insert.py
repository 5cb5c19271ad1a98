"""The serving side of remote ``insert`` and ``open_insert``."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final

from asynckv.buffers.entries.admission import Landed
from asynckv.buffers.entries.entries import Draft, EntryState, StoredEntry
from asynckv.buffers.serving.pushes import ServedPushes
from asynckv.buffers.serving.requests import LookupRequests
from asynckv.buffers.serving.service import REQUEST_NBYTES, answer_at_once
from asynckv.errors import AsyncKVError, EntryAborted, PeerLost, RemoteProtocolError
from asynckv.links.link import LinkStream
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Cancelled,
    Commit,
    Frame,
    Insert,
    Push,
    Retract,
)
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.transfers.incoming import Incoming, Route, receive_frame
from asynckv.transfers.manifest import INLINE_NBYTES, Manifest, unpack, verify_inline
from asynckv.transfers.targets import Target, fill_targets, target_in
from asynckv.transfers.tokens import check_mask, check_tokens
from asynckv.waits.waiting import Reply

__all__ = (
    "ServedInsert",
    "ServedWriter",
    "answer",
    "draft_of",
    "kept_nbytes",
)


_AT_A_TIME: Final = 64
"""For so many tensors memory is found in half a millisecond."""

_RECORD_NBYTES: Final = 512
"""A tensor's name and shape in our memory, beside what the peer says of it."""

logger = logging.getLogger(__name__)


def draft_of(frame: Insert, manifest: Manifest, service: LookupRequests) -> Draft:
    """Check what a peer says about its entry.

    :raises ValueError: tokens and roi do not fit each other
    """
    tokens, roi = manifest.input_tokens, manifest.roi
    if tokens is not None:
        check_tokens(tokens)
    if roi is not None:
        check_mask(roi, tokens)
    return Draft(
        entry_id=frame.entry_id,
        input_tokens=tokens,
        roi=roi,
        layout=manifest.layout,
        fingerprint=service.link.fingerprint,
        ttl_s=frame.ttl_s,
        deliveries=frame.deliveries,
        streaming=frame.streaming,
    )


def kept_nbytes(manifest: Manifest, body: bytes) -> int:
    """Return what an insert with this body keeps in memory until it ends."""
    return REQUEST_NBYTES + _RECORD_NBYTES * len(manifest.digests) + len(body)


class ServedInsert:
    """One remote insert: the source of its entry's bytes.

    What came along is in, and answered, at once, if it is to wait for nothing.
    """

    def __init__(
        self, service: LookupRequests, stream: LinkStream, frame: Insert, body: bytes
    ) -> None:
        self._service = service
        self._stream = stream
        self._frame = frame
        self._incoming: Incoming | None = None
        self._task: asyncio.Task[None] | None = None
        manifest = unpack(body, inline=frame.inline)
        self._draft = draft_of(frame, manifest, service)
        # More than rides along by the rules is too much to be looked at on the loop.
        rides = frame.inline and manifest.layout.nbytes <= INLINE_NBYTES
        self._inline = manifest.inline if rides else None
        self._digests = verify_inline(manifest) if rides else []
        if service.link.digest == "off":
            # As those that come by payload: of a link without digests none is known.
            self._digests = [b""] * len(self._digests)
        self._digest = frame.digest or None
        if rides and not service.predecessors:
            try:
                is_in = service.buffer.admission.insert_nowait(
                    *(self._draft, manifest.inline, self._digests, self._digest)
                )
            except Exception as error:  # noqa: BLE001 - it is the peer's to know
                _answer_failure(stream, error)
                return
            if is_in:
                answer_at_once(stream, Accepted())
                return
        nbytes = kept_nbytes(manifest, body)
        if frame.inline and not (rides and service.kept.inserts.fits(nbytes)):
            # What rode along in vain is asked for by payload once there is room.
            self._inline, nbytes = None, nbytes - manifest.layout.nbytes
        service.link.payload.announce(frame.transfer)
        self._task = service.run_insert(self._run, frame.entry_id, nbytes)
        self._task.add_done_callback(partial(answer, stream))

    async def fill(self, entry: StoredEntry, landed: Landed) -> None:
        pool = self._service.buffer.pool
        targets = list[Target]()
        for index, part in enumerate(entry.parts, 1):
            if part.region is None:
                return  # the entry has left while others had their turn
            targets.append(target_in(part.region, part, pool))
            if not index % _AT_A_TIME:
                await asyncio.sleep(0)
        if self._inline is not None:
            await fill_targets(targets, self._inline, self._digests)
            for index, digest in enumerate(self._digests):
                landed(index, digest)
        elif targets:
            self._incoming = Incoming(
                *(self._stream, self._frame.transfer, targets, landed),
                route=None if pool.device is None else self._device_route,
            )
            del targets  # the transport's alone: the memory may be wanted back
            await self._incoming.receive()

    def on_frame(self, frame: Frame, body: bytes) -> None:
        if isinstance(frame, Cancel):
            self._cancel()
        else:
            receive_frame(self._incoming, frame, body)

    def on_lost(self, error: PeerLost) -> None:
        self._cancel()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _device_route(self) -> Route | None:
        return self._service.devices.device_route(on_gpu=self._frame.on_gpu)

    async def _run(self) -> None:
        if self._service.predecessors:
            await self._service.after_predecessors()
        admission = self._service.buffer.admission
        await admission.insert(self._draft, self, self._digest)


def answer(stream: LinkStream, task: asyncio.Task[None]) -> None:
    """Send a request's last frame when its task is over."""
    error = None if task.cancelled() else task.exception()
    if task.cancelled():
        stream.send(Cancelled())
    elif error is None:
        stream.send(Accepted())
    else:
        _answer_failure(stream, error)
    stream.close()


def _answer_failure(stream: LinkStream, error: BaseException) -> None:
    """Send a request's last frame when it has failed; a fault of ours ends it alone."""
    if not isinstance(error, (AsyncKVError, ValueError)):
        logger.error("a request failed by a fault of ours", exc_info=error)
    stream.send(to_failure(error))
    stream.close()


class ServedWriter:
    """One entry whose tensors come one by one, once it has room."""

    def __init__(
        self, service: LookupRequests, stream: LinkStream, frame: Insert, body: bytes
    ) -> None:
        self._service = service
        self._stream = stream
        self._frame = frame
        manifest = unpack(body, inline=False)
        self._draft = draft_of(frame, manifest, service)
        self._pushes: ServedPushes | None = None
        self._is_committed = False
        self._ended: Reply[None] = Reply()
        self._task = service.run_insert(
            self._run, frame.entry_id, kept_nbytes(manifest, body)
        )
        self._task.add_done_callback(partial(answer, stream))

    def on_frame(self, frame: Frame, body: bytes) -> None:
        pushes = self._pushes
        if isinstance(frame, Cancel):
            self._task.cancel()
            return
        if pushes is None:
            name = type(frame).__name__
            raise RemoteProtocolError(f"a {name} came for what was never granted")
        pushes.silence.note_progress()
        match frame:
            case Push():
                pushes.on_push(frame, body)
            case Sent():
                pushes.on_sent(frame)
            case Retract(transfer=transfer):
                pushes.on_retract(transfer)
            case Commit():
                self._is_committed = True
                self.pushed(pushes)
            case _:
                raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")

    def on_lost(self, error: PeerLost) -> None:
        self._task.cancel()

    def pushed(self, pushes: ServedPushes) -> None:
        """Look whether this was the last that was needed."""
        entry = pushes.entry
        if self._is_committed and pushes.are_whole:
            self._ended.give(None)
        elif entry.state is EntryState.GONE:
            if entry.left_by:
                self.fail(EntryAborted(reason=entry.left_by))
            elif self._is_committed:
                self._ended.give(None)  # acknowledged: the rest is not needed

    def fail(self, error: Exception) -> None:
        """The writer cannot go on."""
        self._ended.fail(error)

    async def _run(self) -> None:
        admission = self._service.buffer.admission
        entry = await admission.begin(self._draft)
        pushes = ServedPushes(self._service, self._stream, entry, self)
        self._pushes = pushes
        try:
            self._stream.send(Grant(self._frame.transfer))
            await self._ended
        except BaseException:
            admission.abort(entry)
            raise
        finally:
            await self._quiet(entry, pushes)
        await admission.finish(entry)

    async def _quiet(self, entry: StoredEntry, pushes: ServedPushes) -> None:
        try:
            await pushes.quiesce()
        except BaseException:  # a Cancel behind the Commit: nobody else would end it
            self._service.buffer.admission.abort(entry)
            raise
