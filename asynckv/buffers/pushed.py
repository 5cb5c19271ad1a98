"""One tensor that a remote ``open_insert`` puts, on its way into its region."""

from __future__ import annotations

import abc
from typing import Protocol

from asynckv.buffers.part_landing import PartLanding
from asynckv.buffers.sent_parts import PartsOnGpu, SentOnGpu, note_sent
from asynckv.errors import RemoteProtocolError
from asynckv.links.gpu_link import GpuPathLost
from asynckv.links.ipc_arrivals import IpcArrivals
from asynckv.links.link import Link
from asynckv.links.receiving import Reception
from asynckv.protocol.device_frames import GrantDevices
from asynckv.protocol.frames import Push
from asynckv.protocol.ipc_frames import GrantShared
from asynckv.protocol.payload_frames import Done, Grant
from asynckv.tensors.cuda import DeviceMemory

__all__ = ("PushSink", "Pushed", "PushedByGpu", "PushedByHost")


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
