"""What is read in memory of one GPU that a peer shows, into this side's own there.

A part counts as landed when it was copied, and what the peer has said of it was
computed once more of what lies in this side's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from asynckv.errors import ChecksumError, GPUFailed, RemoteProtocolError
from asynckv.links.progress import Progress
from asynckv.protocol.handshake import DigestMode, strictest
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.sharing.gpu_channel import RouteLost, other_bytes
from asynckv.sharing.imports import PeerMemory
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.runs import Memory
from asynckv.waits.own_tasks import OwnTasks

__all__ = ("IpcRoute",)

_Done = Callable[[bytes, BaseException | None], None]


class IpcRoute:
    """One transfer; fits :class:`~asynckv.transfers.incoming.DeviceRoute`.

    ``digest`` is what this side wants to be compared. With ``is_kept`` the digest of a
    part that has landed is of all its bytes, whatever was compared. It is lost where
    the peer does not have a part there, or that cannot be read.
    """

    reads_peer: ClassVar[bool] = True
    is_given_up: ClassVar[bool] = False

    def __init__(
        self,
        memory: PeerMemory,
        pool: DeviceCopyPool,
        progress: Progress,
        digest: DigestMode,
        *,
        is_kept: bool,
    ) -> None:
        self.digest: DigestMode = digest
        self.progress = progress
        self._memory = memory
        self._pool = pool
        self._is_kept = is_kept
        self._awaited: dict[int, tuple[DeviceMemory, _Done]] = {}
        self._reading = OwnTasks()
        self._is_stopped = False

    def grant(self, transfer: int) -> Grant:
        """Return what the peer is told once :meth:`receive` was called."""
        return Grant(transfer, "cuda_ipc", self.digest)

    def receive(
        self, transfer: int, part: int, target: Memory | DeviceMemory, done: _Done
    ) -> None:
        if not isinstance(target, DeviceMemory):
            raise TypeError("memory of the host does not come this way")
        self._awaited[part] = target, done

    def sent(self, frame: Sent) -> None:
        """The peer says where a part lies, and what its digest is of.

        :raises RemoteProtocolError: there is no such part, or it was said before; it
            lies beyond what is shown; less is to be compared than this side asks for;
            or it was sent
        """
        if frame.route != "cuda_ipc":
            raise RemoteProtocolError(f"sent by {frame.route}, granted otherwise")
        if self._is_stopped:
            return
        part, own = frame.part, self.digest
        if part not in self._awaited:
            raise RemoteProtocolError(f"part {part} lies there, which makes no sense")
        if frame.offset is None:
            _, done = self._awaited.pop(part)
            done(b"", RouteLost(GPUFailed("the peer has it elsewhere")))
            return
        if strictest(own, frame.kind) != frame.kind:
            raise RemoteProtocolError(f"digests of {frame.kind}, not of {own}")
        self._memory.check(frame.offset, self._awaited[part][0].nbytes)
        target, done = self._awaited.pop(part)
        self._read(frame, frame.offset, target, done)

    def landed_bytes(self, transfer: int) -> int:
        """Bytes of parts that are not whole yet: nobody knows."""
        return 0

    def stop(self, transfer: int) -> None:
        self._is_stopped = True
        self._awaited.clear()
        self._reading.cancel()

    async def quiesce(self, transfer: int) -> None:
        self.stop(transfer)
        # All of them, however often the wait is cancelled: the peer is told then.
        await self._reading.quiesce()

    def _read(
        self, frame: Sent, offset: int, target: DeviceMemory, done: _Done
    ) -> None:
        found = list[bytes]()
        nbytes = target.nbytes

        def read(error: Exception | None) -> None:
            if error is None:
                self.progress.note(nbytes)
                done(found[0], None)
            elif isinstance(error, ChecksumError):
                done(b"", error)
            else:
                done(b"", RouteLost(error))

        copy = partial(self._copy, frame, found)
        self._reading.adopt(self._memory.read(offset, target, copy, read))

    async def _copy(
        self,
        frame: Sent,
        found: list[bytes],
        source: DeviceMemory,
        target: DeviceMemory,
    ) -> None:
        is_digested = self._is_kept or frame.kind == "full"
        with self.progress.working(frame.transfer):
            (whole,) = await self._pool.copy([source], [target], digest=is_digested)
            landed = whole if frame.kind == "full" else b""
            if frame.kind == "edges":
                (landed,) = await self._pool.edges([target])
        if landed != frame.digest:
            raise other_bytes(frame.part)
        found.append(whole if self._is_kept else b"")
