"""The serving side of the tensors that a remote ``open_insert`` puts, one by one.

Each is a transfer of its own: what was taken back comes again under another number.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import NamedTuple, Protocol

from asynckv.buffers.entries.entries import StoredEntry
from asynckv.buffers.serving.requests import LookupRequests
from asynckv.buffers.serving.service import Silence
from asynckv.errors import ChecksumError, EntryTooLarge, GPUFailed, RemoteProtocolError
from asynckv.links.link import LinkStream
from asynckv.protocol.frames import Push, Retract
from asynckv.protocol.transfer_frames import Sent
from asynckv.protocol.wire import digest_of
from asynckv.tensors.arena import Region
from asynckv.transfers.incoming import Incoming
from asynckv.transfers.manifest import INLINE_NBYTES
from asynckv.transfers.targets import target_in
from asynckv.waits.waiting import wait_shielded

__all__ = ("ServedPushes",)


class _Push(NamedTuple):
    """One tensor on its way into its region."""

    part: int
    incoming: Incoming


class _Writer(Protocol):
    """Who owns the pushes. Called on the loop; never waits."""

    def pushed(self, pushes: ServedPushes) -> None:
        """One more part is in, or is not needed any more."""

    def fail(self, error: Exception) -> None:
        """It cannot go on."""


class ServedPushes:
    """The parts of ``entry`` on their way into its memory, each granted.

    Its ``silence`` listens to the writer from the beginning until :meth:`quiesce`.
    """

    def __init__(
        self,
        service: LookupRequests,
        stream: LinkStream,
        entry: StoredEntry,
        writer: _Writer,
    ) -> None:
        self._service = service
        self._stream = stream
        self.entry = entry
        self._writer = writer
        self._pushes: dict[int, _Push] = {}
        self._retracted: dict[int, list[Incoming]] = {}
        self._to_take: dict[int, int] = {}
        """Parts by transfers that wait until nothing of the same part is received."""
        self._verified: set[int] = set()
        self._has_ended = False
        self.silence = Silence(
            self._landed_bytes, self.failed, is_working=self._is_working
        )

    @property
    def are_whole(self) -> bool:
        """Every part is in, or is not needed any more."""
        return len(self._verified) == len(self.entry.parts)

    def on_push(self, frame: Push, body: bytes) -> None:
        """A tensor follows, or has come along.

        :raises RemoteProtocolError: it makes no sense
        """
        part = frame.part
        if part >= len(self.entry.parts):
            raise RemoteProtocolError("a tensor was pushed that was never declared")
        region = self.entry.parts[part].region
        if region is None:  # the entry has left; it may be pushed again before it hears
            self._stream.send(Retract(frame.transfer))
            self._verified.add(part)
            self._writer.pushed(self)
            return
        coming = {push.part for push in self._pushes.values()}
        if part in coming or part in self._verified or part in self._to_take.values():
            raise RemoteProtocolError("a tensor was pushed twice")
        if frame.transfer in self._pushes or frame.transfer in self._to_take:
            raise RemoteProtocolError("two tensors were pushed under one number")
        if part in self._retracted:
            self._to_take[frame.transfer] = part
            taking = self._take_later(frame, body, region)
            self._service.run(taking, "receiving of a push")
        else:
            self._take_if_possible(frame, body, region)

    def on_sent(self, frame: Sent) -> None:
        """A part was sent, or lies there; of one that was retracted, no matter.

        Of one that has come from GPU to GPU it says that the writer knows that it
        is here: it may be shown from now on.
        """
        push = self._pushes.get(frame.transfer)
        if push is not None:
            push.incoming.on_frame(frame, b"")

    def on_retract(self, transfer: int) -> None:
        """The push is void; the same part may be pushed again."""
        self._to_take.pop(transfer, None)
        push = self._pushes.get(transfer)
        if push is None or push.incoming.has_come:
            return
        del self._pushes[transfer]
        push.incoming.stop()
        self._retracted.setdefault(push.part, []).append(push.incoming)
        if push.incoming.reads_peer:
            self._service.run(self._release_incoming(push.incoming), "end of a push")

    def failed(self, error: Exception) -> None:
        """Some part will not become whole."""
        self._writer.fail(error)

    async def quiesce(self) -> None:
        """Listen no more, and wait until no thread touches the entry's memory."""
        self._has_ended = True
        self.silence.stop()
        every = [push.incoming for push in self._pushes.values()]
        for retracted in self._retracted.values():
            every += retracted
        quiet = [incoming.quiesce() for incoming in every]
        # All of them, however often the wait is cancelled: the writer is told then.
        await wait_shielded(asyncio.gather(*quiet, return_exceptions=True))

    def _take_if_possible(self, frame: Push, body: bytes, region: Region) -> None:
        try:
            self._take(frame, body, region)
        except EntryTooLarge as exc:  # memory was refused: no fault of the link
            self.failed(exc)

    def _take(self, frame: Push, body: bytes, region: Region) -> None:
        if not frame.inline:
            self._new(frame, region).grant()
            return
        if len(body) != region.nbytes:
            raise RemoteProtocolError("a pushed tensor has not its declared size")
        if len(body) > INLINE_NBYTES:  # too much to be looked at on the loop
            raise RemoteProtocolError(f"{len(body)} bytes came along with a push")
        digest = digest_of(body)
        if frame.digest and frame.digest != digest:
            self.failed(ChecksumError("a pushed tensor changed on its way"))
        else:
            self._new(frame, region).take(memoryview(body), digest)

    def _new(self, frame: Push, region: Region) -> Incoming:
        part, service = frame.part, self._service
        incoming = Incoming(
            *(self._stream, frame.transfer),
            [target_in(region, self.entry.parts[part], service.buffer.pool)],
            partial(self._is_in, frame.transfer, part),
            self.failed,
            route=partial(service.devices.device_route, on_gpu=frame.on_gpu),
            confirms=True,
            is_eager=False,
        )
        self._pushes[frame.transfer] = _Push(part, incoming)
        return incoming

    async def _take_later(self, frame: Push, body: bytes, region: Region) -> None:
        """The same part was being received before: let that end first."""
        for incoming in list(self._retracted.get(frame.part, ())):
            await incoming.quiesce()
            if incoming.is_given_up:
                self.failed(GPUFailed("the GPU may write for ever where a part was"))
                return
        if frame.transfer in self._to_take and not self._has_ended:
            del self._to_take[frame.transfer]
            self._retracted.pop(frame.part, None)
            self._take_if_possible(frame, body, region)

    async def _release_incoming(self, incoming: Incoming) -> None:
        """Tell the writer once nothing reads any more what it has taken back."""
        await incoming.quiesce()
        self._stream.send(Retract(incoming.transfer))

    def _is_in(self, transfer: int, part: int, _: int, digest: bytes) -> None:
        """One part is in, for whoever consumes the entry."""
        del self._pushes[transfer]
        self.silence.note_progress()
        self._verified.add(part)
        self._service.buffer.ledger.landed(self.entry, part, digest)
        self._writer.pushed(self)

    def _is_working(self) -> bool:
        """Is it this side that the parts wait for?"""
        return any(push.incoming.is_working for push in self._pushes.values())

    def _landed_bytes(self) -> dict[int, int]:
        return {x: push.incoming.landed_bytes for x, push in self._pushes.items()}
