"""The serving side of the tensors that a remote ``open_insert`` puts, one by one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from asynckv.buffers.entries import StoredEntry
from asynckv.buffers.part_landing import PartLanding, lift_landed
from asynckv.errors import ChecksumError, EntryAborted, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.links.receiving import Reception
from asynckv.links.requests import LinkStream
from asynckv.protocol.digests import digest_of
from asynckv.protocol.frames import (
    Push,
    Retract,
)
from asynckv.protocol.payload_frames import Done, Grant
from asynckv.shielding import wait_shielded
from asynckv.tensors.arena import Region

if TYPE_CHECKING:
    from asynckv.buffers.serve_lookup import LookupService

__all__ = ("SILENCE_S", "ServedPushes")

SILENCE_S: Final = 30.0
"""A writer that puts nothing for as long, on a live link, has failed."""


class _Writer(Protocol):
    """Who owns the pushes. Called on the loop; never waits."""

    def pushed(self, pushes: ServedPushes) -> None:
        """One more part is in, or is not needed any more."""

    def fail(self, error: Exception) -> None:
        """It cannot go on."""


class ServedPushes:
    """The parts of ``entry`` on their way into its memory, each granted.

    Also judges whether the writer has fallen silent, from the beginning until
    :meth:`quiesce`.
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
        self._coming: dict[int, _Pushed] = {}
        self._retracted: dict[int, list[Reception]] = {}
        self._to_grant: set[int] = set()
        self._verified: set[int] = set()
        self._lifting: dict[int, asyncio.Task[None]] = {}
        self._has_ended = False
        self._landed_bytes: dict[int, int] = {}
        self._silence = self._listen()

    @property
    def are_whole(self) -> bool:
        """Every part is in, or is not needed any more."""
        return len(self._verified) == len(self.entry.parts)

    def hear(self) -> None:
        """The writer is alive."""
        self._silence.cancel()
        if not self._has_ended:
            self._silence = self._listen()

    def on_push(self, frame: Push, body: bytes) -> None:
        """A tensor follows, or has come along.

        :raises RemoteProtocolError: it makes no sense
        """
        if frame.part >= len(self.entry.parts):
            raise RemoteProtocolError("a tensor was pushed that was never declared")
        coming = any(pushed.index == frame.part for pushed in self._coming.values())
        if coming or frame.part in self._verified or frame.part in self._lifting:
            raise RemoteProtocolError("a tensor was pushed twice")
        region = self.entry.parts[frame.part].region
        if region is None:  # the entry has left
            self._stream.send(Retract(frame.transfer))
            self._verified.add(frame.part)
            self._writer.pushed(self)
        elif frame.inline:
            self._take_inline(frame, body, region)
        elif frame.part in self._retracted:
            self._to_grant.add(frame.transfer)
            self._service.run(self._grant_later(frame, region), "grant of a push")
        else:
            self._grant(frame, region)

    def on_done(self, frame: Done) -> None:
        """The last byte of a part was sent; of one that was retracted, no matter."""
        pushed = self._coming.get(frame.transfer)
        if pushed is not None:
            pushed.reception.on_done(frame)

    def on_retract(self, transfer: int) -> None:
        """The push is void; the same part may be pushed again."""
        self._to_grant.discard(transfer)
        pushed = self._coming.get(transfer)
        if pushed is not None and pushed.index not in self._lifting:
            del self._coming[transfer]
            pushed.reception.stop()
            self._retracted.setdefault(pushed.index, []).append(pushed.reception)

    def verified(self, index: int, digest: bytes, landing: PartLanding) -> None:
        """One part is whole, and its bytes are those that were sent."""
        self.hear()
        if landing.is_to_be_lifted:
            lifting = self._lift(index, digest, landing)
            self._lifting[index] = self._service.run(lifting, "copy to a GPU")
        else:
            self._is_in(index, digest)

    def failed(self, error: Exception) -> None:
        """Some part will not become whole."""
        self._writer.fail(error)

    async def quiesce(self) -> None:
        """Listen no more, and wait until no thread touches the entry's memory."""
        self._has_ended = True
        self._silence.cancel()
        receptions = [pushed.reception for pushed in self._coming.values()]
        for retracted in self._retracted.values():
            receptions += retracted
        for reception in receptions:  # all of them, also if the wait is cancelled
            reception.stop()
        for task in self._lifting.values():
            task.cancel()
        for reception in receptions:
            await reception.quiesce()
        for task in self._lifting.values():
            await wait_shielded(task)

    def _take_inline(self, frame: Push, body: bytes, region: Region) -> None:
        if len(body) != region.nbytes:
            raise RemoteProtocolError("a pushed tensor has not its declared size")
        digest = digest_of(body)
        if frame.digest and frame.digest != digest:
            self.failed(ChecksumError("a pushed tensor changed on its way"))
            return
        landing = self._landing(frame.part, region)
        landing.fill(memoryview(body))
        self.verified(frame.part, digest, landing)

    def _grant(self, frame: Push, region: Region) -> None:
        landing = self._landing(frame.part, region)
        pushed = _Pushed(self, frame, self._service.link, landing)
        self._coming[frame.transfer] = pushed
        pushed.reception.begin()
        self._stream.send(Grant(frame.transfer))

    async def _grant_later(self, frame: Push, region: Region) -> None:
        """The same part was being received before: let that end first."""
        for reception in list(self._retracted.get(frame.part, ())):
            await reception.quiesce()
        if frame.transfer in self._to_grant and not self._has_ended:
            self._to_grant.remove(frame.transfer)
            self._retracted.pop(frame.part, None)
            self._grant(frame, region)

    def _landing(self, index: int, region: Region) -> PartLanding:
        pool = self._service.buffer.pool
        return PartLanding(region, self.entry.parts[index].spec, pool)

    async def _lift(self, index: int, digest: bytes, landing: PartLanding) -> None:
        """Bring a part to the GPU that it is to be on."""
        try:
            if self.entry.parts[index].region is not None:  # else it has left
                await lift_landed([landing], [digest], self._service.buffer.pool)
        except Exception as exc:  # noqa: BLE001 - the writer is told
            self.failed(exc)
        else:
            self._is_in(index, digest)

    def _is_in(self, index: int, digest: bytes) -> None:
        self._verified.add(index)
        self._service.buffer.ledger.landed(self.entry, index, digest)
        self._writer.pushed(self)

    def _listen(self) -> asyncio.TimerHandle:
        return self._service.loop.call_later(SILENCE_S, self._fall_silent)

    def _fall_silent(self) -> None:
        payload = self._service.link.payload
        landed = {transfer: payload.landed_bytes(transfer) for transfer in self._coming}
        if landed != self._landed_bytes and any(landed.values()):
            self._landed_bytes = landed
            self.hear()  # a tensor is slow, but it comes
            return
        message = f"no tensor came for {SILENCE_S:.0f} s"
        self.failed(EntryAborted(message, reason="producer"))


class _Pushed:
    """One tensor on its way into its region."""

    def __init__(
        self, pushes: ServedPushes, frame: Push, link: Link, landing: PartLanding
    ) -> None:
        self.index = frame.part
        self.reception = Reception(link, frame.transfer, [landing.memory], self)
        self._pushes = pushes
        # Until it has landed: of a GPU's part it has a copy in host memory.
        self._landing = [landing]

    def part_verified(self, index: int, digest: bytes) -> None:
        self._pushes.verified(self.index, digest, self._landing.pop())

    def reception_failed(self, error: Exception) -> None:
        self._pushes.failed(error)
