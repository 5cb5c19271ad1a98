"""The serving side of the tensors that a remote ``open_insert`` puts, one by one.

Each is on its way into its region, or has landed in host memory and is on its way to
the entry's GPU.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable
from typing import Protocol

from asynckv.buffers.entries.entries import StoredEntry
from asynckv.buffers.serving.limits import Silence
from asynckv.buffers.serving.requests import LookupRequests
from asynckv.errors import ChecksumError, EntryTooLarge, GPUFailed, RemoteProtocolError
from asynckv.links.gpu_link import GpuPathLost
from asynckv.links.link import Link
from asynckv.links.progress import OWN_WORK_S
from asynckv.links.requests import LinkStream
from asynckv.protocol.digests import digest_of
from asynckv.protocol.frames import Push, Retract
from asynckv.protocol.transfer_frames import Done, Grant, GrantDevices, GrantShared
from asynckv.shielding import wait_shielded
from asynckv.tensors.arena import Region
from asynckv.tensors.cuda import DeviceMemory
from asynckv.transfers.incoming import (
    PartLanding,
    PartsOnGpu,
    SentOnGpu,
    lift_landed,
    note_sent,
    on_gpu,
)
from asynckv.transfers.ipc_route import IpcArrivals
from asynckv.transfers.reception import Reception

__all__ = (
    "PartLifts",
    "PushSink",
    "Pushed",
    "PushedByGpu",
    "PushedByHost",
    "ServedPushes",
)


class PartLifts:
    """Those of one ``entry``; one that was begun is known here for good.

    ``is_in(index, digest)`` is called when a part is on the GPU, or is not needed any
    more, ``failed`` with why it is not there.
    """

    def __init__(
        self,
        service: LookupRequests,
        entry: StoredEntry,
        is_in: Callable[[int, bytes], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._service = service
        self._entry = entry
        self._is_in = is_in
        self._failed = failed
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._begun_s: dict[int, float] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._tasks

    @property
    def are_working(self) -> bool:
        """Is one on its way, for less than ``OWN_WORK_S`` so far?"""
        if not self._begun_s:
            return False
        latest_s = max(self._begun_s.values())
        return asyncio.get_running_loop().time() - latest_s < OWN_WORK_S

    def landing(self, index: int, region: Region) -> PartLanding:
        """Return where a part lands first."""
        pool = self._service.buffer.pool
        return PartLanding(region, self._entry.parts[index].spec, pool)

    def begin(self, index: int, digest: bytes, landing: PartLanding) -> None:
        """Bring a part that has landed to its GPU. Never waits."""
        lifting = self._lift(index, digest, landing)
        self._begun_s[index] = asyncio.get_running_loop().time()
        self._tasks[index] = self._service.run(lifting, "copy to a GPU")
        self._tasks[index].add_done_callback(lambda _: self._begun_s.pop(index))

    def cancel(self) -> list[asyncio.Task[None]]:
        """Bring no more there; return what ends when no GPU writes any more."""
        for task in self._tasks.values():
            task.cancel()
        return [*self._tasks.values()]

    async def _lift(self, index: int, digest: bytes, landing: PartLanding) -> None:
        try:
            if self._entry.parts[index].region is not None:  # else it has left
                await lift_landed([landing], [digest], self._service.buffer.pool)
        except Exception as exc:  # noqa: BLE001 - the writer is told
            self._failed(exc)
        else:
            self._is_in(index, digest)


class PushSink(Protocol):
    """Who is told what becomes of it. Called on the loop; never waits."""

    def verified(self, index: int, digest: bytes, landing: PartLanding) -> None:
        """It is whole, in host memory, and its bytes are those that were sent."""

    def came_by_gpu(self, transfer: int) -> None:
        """It is verified, where it belongs: the writer may say so."""

    def is_in(self, index: int, digest: bytes) -> None:
        """The writer has said so."""

    def lost_way(self, pushed: Pushed, lost: GpuPathLost) -> None:
        """It cannot come from GPU to GPU: the writer still has it."""

    def failed(self, error: Exception) -> None:
        """It will not become whole."""


class Pushed(abc.ABC):
    """One tensor on its way into its region."""

    reception: Reception
    grant: Grant | GrantDevices | GrantShared

    def __init__(self, pushes: PushSink, frame: Push) -> None:
        self.frame = frame
        self.index = frame.part
        self._pushes = pushes

    @property
    def is_given_up(self) -> bool:
        """May a GPU's worker that was given up write for ever where it was to land?"""
        return False

    @property
    def is_read_there(self) -> bool:
        """Does the writer keep it until it hears that nothing reads it any more?"""
        return False

    @property
    def is_worked_at(self) -> bool:
        """Is it this side that copies, or digests, it now (at most ``OWN_WORK_S``)?"""
        return False

    async def quiesce(self) -> None:
        """Wait until no thread touches its memory, as its reception does."""
        await self.reception.quiesce()

    @property
    @abc.abstractmethod
    def landed_bytes(self) -> int:
        """How much of it has landed, while it is not whole."""

    @abc.abstractmethod
    def on_done(self, frame: Done) -> None:
        """The writer has said its last word: that it is sent, with its digest.

        Of what comes from GPU to GPU: that the writer knows that it is verified.
        """

    @abc.abstractmethod
    def on_sent(self, frame: SentOnGpu) -> None:
        """The writer says that it is sent, from GPU to GPU, or where it lies."""

    @abc.abstractmethod
    def part_verified(self, index: int, digest: bytes) -> None:
        """All of it is there."""

    def reception_failed(self, error: Exception) -> None:
        self._pushes.failed(error)


class PushedByHost(Pushed):
    """It comes by the link's payload: straight to where it belongs, or by a copy.

    If it ``is_again``, it was to come from GPU to GPU before.
    """

    def __init__(
        self,
        pushes: PushSink,
        frame: Push,
        link: Link,
        landing: PartLanding,
        *,
        is_again: bool,
    ) -> None:
        super().__init__(pushes, frame)
        self.reception = Reception(link, frame.transfer, [landing.memory], self)
        self.grant = Grant(frame.transfer)
        self._payload = link.payload
        self._is_again = is_again
        # Until it has landed: of a GPU's part it has a copy in host memory.
        self._landing = [landing]

    @property
    def landed_bytes(self) -> int:
        return self._payload.landed_bytes(self.frame.transfer)

    def on_done(self, frame: Done) -> None:
        self.reception.on_done(frame)

    def on_sent(self, frame: SentOnGpu) -> None:
        if not self._is_again:  # else it was said before the way was lost
            raise RemoteProtocolError("a tensor of a GPU that was not asked for")

    def part_verified(self, index: int, digest: bytes) -> None:
        self._pushes.verified(self.index, digest, self._landing.pop())


class PushedByGpu(Pushed):
    """It comes from the writer's GPU to where it belongs on this one.

    It counts once the writer knows that it is verified: until then the writer keeps
    it, and may take it back.
    """

    def __init__(
        self,
        pushes: PushSink,
        frame: Push,
        link: Link,
        place: DeviceMemory,
        arrivals: PartsOnGpu,
    ) -> None:
        super().__init__(pushes, frame)
        self.reception = Reception(
            *(link, frame.transfer, [place], self),
            payload=arrivals,
            progress=arrivals.progress,
            is_compared=arrivals.compares,
        )
        self.grant = arrivals.grant(frame.transfer)
        self._arrivals = arrivals
        self._digest: bytes | None = None
        self._is_in = False
        self._was_quiet = False

    @property
    def landed_bytes(self) -> int:
        return self._arrivals.landed_bytes(self.frame.transfer)

    @property
    def is_given_up(self) -> bool:
        return not self._was_quiet and self._arrivals.is_given_up

    @property
    def is_read_there(self) -> bool:
        return isinstance(self._arrivals, IpcArrivals)

    @property
    def is_worked_at(self) -> bool:
        return self._arrivals.progress.is_working(self.frame.transfer)

    async def quiesce(self) -> None:
        await super().quiesce()
        if not self._arrivals.is_given_up:  # a worker given up later is no matter
            self._was_quiet = True

    def on_done(self, frame: Done) -> None:
        if self._digest is None or self._is_in:
            raise RemoteProtocolError("a tensor is done that is not here yet, or was")
        self._is_in = True
        self._pushes.is_in(self.index, self._digest)

    def on_sent(self, frame: SentOnGpu) -> None:
        note_sent(frame, self._arrivals, self.reception)

    def part_verified(self, index: int, digest: bytes) -> None:
        self._digest = digest
        self._pushes.came_by_gpu(self.frame.transfer)

    def reception_failed(self, error: Exception) -> None:
        if isinstance(error, GpuPathLost):
            self._pushes.lost_way(self, error)
        else:
            self._pushes.failed(error)


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
