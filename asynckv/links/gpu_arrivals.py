"""What lands in a GPU's memory from another GPU, and is compared there.

NCCL has no digests. A part counts as landed when its last byte is there and what the
sender has said of it was computed once more, of what lies in the memory.
"""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import Callable
from typing import ClassVar, Protocol

from asynckv.errors import RemoteProtocolError
from asynckv.links.gpu_link import GpuLink, GpuPathLost
from asynckv.links.link import Link
from asynckv.links.progress import Progress
from asynckv.protocol.handshake import DigestMode, strictest
from asynckv.protocol.transfer_frames import GrantDevices, SentDevices
from asynckv.shielding import wait_shielded
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.runs import Memory

__all__ = ("GpuArrivals", "Ways")

_Done = Callable[[bytes, BaseException | None], None]


@dataclasses.dataclass(slots=True)
class _Part:
    transfer: int
    memory: DeviceMemory
    done: _Done
    kind: DigestMode | None = None
    has_landed: bool = False


class GpuArrivals:
    """One transfer; fits :class:`~asynckv.transfers.reception.PartReceiver`.

    Errors that it tells are :exc:`GpuPathLost` where the way itself was lost.
    ``digest`` is what this side wants to be compared, by default as of all that comes
    by that way.
    """

    compares: ClassVar[bool] = False
    """Is what has landed compared with what was sent, before it is told?"""

    def __init__(
        self, gpus: GpuLink, pool: DeviceCopyPool, digest: DigestMode | None = None
    ) -> None:
        self.gpus = gpus
        self.pool = pool
        self.digest: DigestMode = gpus.digest if digest is None else digest
        self._loop = asyncio.get_running_loop()
        self._parts: dict[int, _Part] = {}
        self._comparing: set[asyncio.Task[None]] = set()
        self._is_stopped = False
        self._lost: weakref.WeakMethod[Callable[[GpuPathLost], None]] | None = None
        gpus.expect(self)

    def grant(self, transfer: int) -> GrantDevices:
        """Return what the peer is told once :meth:`receive` was called."""
        return GrantDevices(transfer, self.digest)

    @property
    def progress(self) -> Progress:
        """Watches what is to come."""
        return self.gpus.progress

    @property
    def is_given_up(self) -> bool:
        """Whether the GPU's worker was: it may write for ever where it was to."""
        return self.gpus.is_given_up

    @property
    def are_awaited(self) -> bool:
        return bool(self._parts)

    def receive(
        self, transfer: int, part: int, target: Memory | DeviceMemory, done: _Done
    ) -> None:
        if not isinstance(target, DeviceMemory):
            raise TypeError("memory of the host does not come this way")
        self._parts[part] = _Part(transfer, target, done)

        def landed(_: bytes, error: BaseException | None) -> None:
            if error is not None:
                done(b"", self.gpus.lost(error))
            else:
                self._parts[part].has_landed = True
                self._compare_if_due(part)

        self.gpus.transport.receive(transfer, part, target, landed)

    def sent(self, frame: SentDevices) -> None:
        """The peer has sent a part, and says what its digest is of.

        :raises RemoteProtocolError: there is no such part, it was sent before, or less
            is to be compared than this side asks for
        """
        if self._is_stopped:
            return
        part = self._parts.get(frame.part)
        own = self.digest
        if part is None or part.kind is not None:
            raise RemoteProtocolError(
                f"part {frame.part} was sent, which makes no sense"
            )
        if strictest(own, frame.kind) != frame.kind:
            raise RemoteProtocolError(f"digests of {frame.kind}, not of {own}")
        part.kind = frame.kind
        self._compare_if_due(frame.part)

    def landed_bytes(self, transfer: int) -> int:
        """Bytes that have landed of parts that are not whole yet."""
        return self.gpus.transport.landed_bytes(transfer)

    def call_when_lost(self, lost: Callable[[GpuPathLost], None]) -> None:
        """Call a method, if its object is still there, once nothing more can come.

        Also where what is left rides: nobody watches any more whether that comes.
        """
        self._lost = weakref.WeakMethod(lost)

    def fail(self, error: GpuPathLost) -> None:
        """Nothing more comes: whoever waits for a part is told."""
        for part in list(self._parts.values()):
            part.done(b"", error)
        if self._lost is not None and (lost := self._lost()) is not None:
            lost(error)

    def stop(self, transfer: int) -> None:
        self._is_stopped = True
        self._parts.clear()
        self.gpus.transport.stop(transfer)
        for task in self._comparing:
            task.cancel()

    async def quiesce(self, transfer: int) -> None:
        self.stop(transfer)
        try:  # each waits, however often the one before it was cancelled
            await self.gpus.transport.quiesce(transfer)
        finally:
            comparing = asyncio.gather(*self._comparing, return_exceptions=True)
            await wait_shielded(comparing)

    def _compare_if_due(self, number: int) -> None:
        part = self._parts[number]
        if part.kind is None or not part.has_landed:
            return
        del self._parts[number]
        task = self._loop.create_task(self._compare(part), name="asynckv: digest")
        self._comparing.add(task)
        task.add_done_callback(self._comparing.discard)

    async def _compare(self, part: _Part) -> None:
        digest = b""
        try:
            with self.progress.working(part.transfer):
                if part.kind == "full":
                    (digest,) = await self.pool.digest([part.memory])
                elif part.kind == "edges":
                    (digest,) = await self.pool.edges([part.memory])
        except Exception as exc:  # noqa: BLE001 - whoever waits is told
            part.done(b"", exc)
        else:
            part.done(digest, None)


class Ways(Protocol):
    """Whoever knows what connects its GPU with those of its peers."""

    def arrivals(self, link: Link) -> GpuArrivals | None:
        """Return by what the next delivery may come, ``None`` if by the lanes."""
