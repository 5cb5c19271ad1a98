"""The serving side of one remote ``open_insert``: from its request to its commit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from asynckv.buffers.entries.entries import EntryState, StoredEntry
from asynckv.buffers.manifest import unpack
from asynckv.buffers.serve_insert import answer, draft_of, kept_nbytes
from asynckv.buffers.serve_pushes import ServedPushes
from asynckv.errors import EntryAborted, PeerLost, RemoteProtocolError
from asynckv.links.requests import LinkStream
from asynckv.protocol.device_frames import SentDevices
from asynckv.protocol.frames import (
    Cancel,
    Commit,
    Frame,
    Insert,
    Push,
    Retract,
)
from asynckv.protocol.ipc_frames import SentShared
from asynckv.protocol.payload_frames import Done, Grant

if TYPE_CHECKING:
    from asynckv.buffers.serve_lookup import LookupService

__all__ = ("ServedWriter",)


class ServedWriter:
    """One entry whose tensors come one by one, once it has room."""

    def __init__(
        self, service: LookupService, stream: LinkStream, frame: Insert, body: bytes
    ) -> None:
        self._service = service
        self._stream = stream
        self._frame = frame
        manifest = unpack(body, inline=False)
        self._draft = draft_of(frame, manifest, service)
        self._pushes: ServedPushes | None = None
        self._is_committed = False
        self._ended: asyncio.Future[None] = service.loop.create_future()
        self._task = service.run_insert(
            self._run, frame.entry_id, kept_nbytes(manifest, body)
        )
        self._task.add_done_callback(lambda task: answer(stream, task))

    def on_frame(self, frame: Frame, body: bytes) -> None:
        pushes = self._pushes
        if isinstance(frame, Cancel):
            self._task.cancel()
            return
        if pushes is None:
            name = type(frame).__name__
            raise RemoteProtocolError(f"a {name} came for what was never granted")
        pushes.silence.hear()
        match frame:
            case Push():
                pushes.on_push(frame, body)
            case Done():
                pushes.on_done(frame)
            case SentDevices() | SentShared():
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
        if self._ended.done():
            return
        if self._is_committed and pushes.are_whole:
            self._ended.set_result(None)
        elif entry.state is EntryState.GONE:
            if entry.left_by:
                self.fail(EntryAborted(reason=entry.left_by))
            elif self._is_committed:
                self._ended.set_result(None)  # acknowledged: the rest is not needed

    def fail(self, error: Exception) -> None:
        """The writer cannot go on."""
        if not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()  # the writer may have been cancelled meanwhile

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
            self._ended.cancel()
            await self._quiet(entry, pushes)
        await admission.finish(entry)

    async def _quiet(self, entry: StoredEntry, pushes: ServedPushes) -> None:
        try:
            await pushes.quiesce()
        except BaseException:  # a Cancel behind the Commit: nobody else would end it
            self._service.buffer.admission.abort(entry)
            raise
