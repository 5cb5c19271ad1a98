"""The serving side of the tensors that a remote ``open_insert`` puts, one by one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from asynckv.buffers.entries.entries import StoredEntry
from asynckv.buffers.part_landing import PartLanding, on_gpu
from asynckv.buffers.part_lifts import PartLifts
from asynckv.buffers.pushed import Pushed, PushedByGpu, PushedByHost
from asynckv.buffers.sent_parts import SentOnGpu
from asynckv.buffers.silence import Silence
from asynckv.errors import ChecksumError, EntryTooLarge, GPUFailed, RemoteProtocolError
from asynckv.links.gpu_link import GpuPathLost
from asynckv.links.requests import LinkStream
from asynckv.protocol.digests import digest_of
from asynckv.protocol.frames import (
    Push,
    Retract,
)
from asynckv.protocol.payload_frames import Done
from asynckv.shielding import wait_shielded
from asynckv.tensors.arena import Region

if TYPE_CHECKING:
    from asynckv.buffers.serve_lookup import LookupService

__all__ = ("ServedPushes",)


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
        service: LookupService,
        stream: LinkStream,
        entry: StoredEntry,
        writer: _Writer,
    ) -> None:
        self._service = service
        self._stream = stream
        self.entry = entry
        self._writer = writer
        self._coming: dict[int, Pushed] = {}
        self._retracted: dict[int, list[Pushed]] = {}
        self._to_grant: set[int] = set()
        self._verified: set[int] = set()
        self._lifts = PartLifts(service, entry, self.is_in, self.failed)
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
        if frame.part >= len(self.entry.parts):
            raise RemoteProtocolError("a tensor was pushed that was never declared")
        coming = any(pushed.index == frame.part for pushed in self._coming.values())
        if coming or frame.part in self._verified or frame.part in self._lifts:
            raise RemoteProtocolError("a tensor was pushed twice")
        region = self.entry.parts[frame.part].region
        if region is None:  # the entry has left
            self._let_go(frame)
        elif frame.part in self._retracted and not frame.inline:
            self._to_grant.add(frame.transfer)
            self._service.run(self._grant_later(frame, region), "grant of a push")
        else:
            try:
                self._take(frame, body, region)
            except EntryTooLarge as exc:  # memory was refused: no fault of the link
                self.failed(exc)

    def on_done(self, frame: Done) -> None:
        """The last byte of a part was sent; of one that was retracted, no matter.

        Of one that has come from GPU to GPU: the writer knows that it is here, and it
        may be shown from now on.
        """
        pushed = self._coming.get(frame.transfer)
        if pushed is not None:
            pushed.on_done(frame)

    def on_sent(self, frame: SentOnGpu) -> None:
        """A part was sent from GPU to GPU, or lies there; else as :meth:`on_done`."""
        pushed = self._coming.get(frame.transfer)
        if pushed is not None:
            pushed.on_sent(frame)

    def on_retract(self, transfer: int) -> None:
        """The push is void; the same part may be pushed again."""
        self._to_grant.discard(transfer)
        pushed = self._coming.get(transfer)
        if pushed is not None and pushed.index not in self._lifts:
            del self._coming[transfer]
            pushed.reception.stop()
            self._retracted.setdefault(pushed.index, []).append(pushed)
            if pushed.is_read_there:
                self._service.run(self._let_go_of(pushed), "end of a push")

    def verified(self, index: int, digest: bytes, landing: PartLanding) -> None:
        """One part is whole, and its bytes are those that were sent."""
        self.silence.hear()
        if landing.is_to_be_lifted:
            self._lifts.begin(index, digest, landing)
        else:
            self.is_in(index, digest)

    def came_by_gpu(self, transfer: int) -> None:
        """One part is verified, where it belongs: the writer may say so."""
        self.silence.hear()
        self._stream.send(Done(transfer, 0))

    def lost_way(self, pushed: Pushed, lost: GpuPathLost) -> None:
        """One part cannot come from GPU to GPU: the writer still has it."""
        self._service.run(self._grant_again(pushed, lost), "grant of a push")

    def failed(self, error: Exception) -> None:
        """Some part will not become whole."""
        self._writer.fail(error)

    async def quiesce(self) -> None:
        """Listen no more, and wait until no thread touches the entry's memory."""
        self._has_ended = True
        self.silence.stop()
        every = [*self._coming.values()]
        for retracted in self._retracted.values():
            every += retracted
        receptions = [pushed.reception for pushed in every]
        for reception in receptions:
            reception.stop()
        lifting = self._lifts.cancel()
        quiet = [reception.quiesce() for reception in receptions]
        # All of them, however often the wait is cancelled: the writer is told then.
        await wait_shielded(asyncio.gather(*quiet, *lifting, return_exceptions=True))

    def _take(self, frame: Push, body: bytes, region: Region) -> None:
        if frame.inline:
            self._take_inline(frame, body, region)
        else:
            self._grant(frame, region)

    def _take_inline(self, frame: Push, body: bytes, region: Region) -> None:
        if len(body) != region.nbytes:
            raise RemoteProtocolError("a pushed tensor has not its declared size")
        digest = digest_of(body)
        if frame.digest and frame.digest != digest:
            self.failed(ChecksumError("a pushed tensor changed on its way"))
            return
        landing = self._lifts.landing(frame.part, region)
        landing.fill(memoryview(body))
        self.verified(frame.part, digest, landing)

    def _grant(self, frame: Push, region: Region, *, again: bool = False) -> None:
        by_gpu = None
        if region.is_on_device and not again:
            by_gpu = self._service.devices.arrivals(on_gpu=frame.on_gpu)
        link = self._service.link
        pushed: Pushed
        if by_gpu is not None:
            place = on_gpu(region, self.entry.parts[frame.part].spec)
            pushed = PushedByGpu(self, frame, link, place, by_gpu)
        else:
            landing = self._lifts.landing(frame.part, region)
            pushed = PushedByHost(self, frame, link, landing, is_again=again)
        self._coming[frame.transfer] = pushed
        pushed.reception.begin()
        self._stream.send(pushed.grant)

    async def _grant_later(self, frame: Push, region: Region) -> None:
        """The same part was being received before: let that end first."""
        for pushed in list(self._retracted.get(frame.part, ())):
            await pushed.quiesce()
            if pushed.is_given_up:
                self.failed(GPUFailed("the GPU may write for ever where a part was"))
                return
        if frame.transfer in self._to_grant and not self._has_ended:
            self._to_grant.remove(frame.transfer)
            self._retracted.pop(frame.part, None)
            self._grant(frame, region)

    async def _grant_again(self, pushed: Pushed, lost: GpuPathLost) -> None:
        """Let a part come through host memory when the GPU has left its place."""
        await pushed.quiesce()
        frame = pushed.frame
        region = self.entry.parts[pushed.index].region
        if self._has_ended or self._coming.get(frame.transfer) is not pushed:
            return
        if region is None:  # the entry has left meanwhile: nobody needs the rest
            del self._coming[frame.transfer]
            self._let_go(frame)
        elif lost.is_quiet:
            self._grant(frame, region, again=True)
        else:
            self.failed(GPUFailed(lost.message))

    async def _let_go_of(self, pushed: Pushed) -> None:
        """Tell the writer once nothing reads any more what it has taken back."""
        await pushed.quiesce()
        self._stream.send(Retract(pushed.frame.transfer))

    def _let_go(self, frame: Push) -> None:
        self._stream.send(Retract(frame.transfer))
        self._verified.add(frame.part)
        self._writer.pushed(self)

    def is_in(self, index: int, digest: bytes) -> None:
        """One part is in, for whoever consumes the entry."""
        self._verified.add(index)
        self._service.buffer.ledger.landed(self.entry, index, digest)
        self._writer.pushed(self)

    def _is_working(self) -> bool:
        """Is it this side that the parts wait for?"""
        coming = self._coming.values()
        return self._lifts.are_working or any(one.is_worked_at for one in coming)

    def _landed_bytes(self) -> dict[int, int]:
        return {number: one.landed_bytes for number, one in self._coming.items()}
