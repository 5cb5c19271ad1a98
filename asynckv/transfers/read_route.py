"""What this side reads in memory that a peer shows, into its own.

A part counts as landed when it was copied, and what the peer has said of it was
computed once more of what lies in this side's memory. The peer says that a part lies
there once it was granted, or has said so before: then nothing is granted.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable
from functools import partial
from typing import ClassVar, TypeAlias, cast

import msgspec

from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import ChecksumError, GPUFailed, RemoteProtocolError
from asynckv.links.link import Progress
from asynckv.protocol.handshake import DigestMode, strictest
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.sharing.gpu_channel import RouteLost, other_bytes
from asynckv.sharing.imports import PeerMemory
from asynckv.tensors.runs import Memory
from asynckv.waits.waiting import OwnTasks, clear_all_frames

__all__ = ("DoneCallback", "IpcRoute", "MapRoute", "ReadRoute")

DoneCallback: TypeAlias = Callable[[bytes, BaseException | None], None]


class ReadRoute(abc.ABC):
    """One transfer; fits :class:`~asynckv.transfers.incoming.Route`.

    ``digest`` is what this side wants to be compared. ``told`` is what the peer has
    said of the one part before it was granted.
    """

    is_to_gpu: ClassVar[bool] = True
    reads_peer: ClassVar[bool] = True
    is_given_up: ClassVar[bool] = False

    def __init__(
        self, progress: Progress, digest: DigestMode, told: Sent | None = None
    ) -> None:
        self.digest: DigestMode = digest
        self.progress = progress
        self._told = told
        self._awaited: dict[int, tuple[Memory | DeviceMemory, DoneCallback]] = {}
        self._reading = OwnTasks()
        self._is_stopped = False

    def grant(self, transfer: int) -> Grant | None:
        """Return what the peer is told once :meth:`receive` was called, if anything."""
        return None if self._told else Grant(transfer, "cuda_ipc", self.digest)

    def receive(
        self,
        transfer: int,
        part: int,
        target: Memory | DeviceMemory,
        done: DoneCallback,
    ) -> None:
        if isinstance(target, DeviceMemory) is not self.is_to_gpu:
            raise TypeError("memory of the host, or of a GPU, does not come this way")
        self._awaited[part] = target, done
        if self._told is not None:
            # What was told before has no number yet that its progress goes by.
            told = msgspec.structs.replace(self._told, transfer=transfer, part=part)
            self._on_sent(told)

    def sent(self, frame: Sent) -> None:
        """The peer says that a part lies there, and what its digest is of.

        :raises RemoteProtocolError: there is no such part, or it was said before; it
            lies beyond what is shown; less is to be compared than this side asks for;
            or it was sent
        """
        if frame.route != "cuda_ipc":
            raise RemoteProtocolError(f"sent by {frame.route}, granted otherwise")
        if not self._is_stopped:
            self._on_sent(frame)

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

    def _on_sent(self, frame: Sent) -> None:
        part, own = frame.part, self.digest
        if part not in self._awaited:
            raise RemoteProtocolError(f"part {part} lies there, which makes no sense")
        target, done = self._awaited[part]
        is_there = self._is_there(frame, target.nbytes)
        if is_there and strictest(own, frame.kind) != frame.kind:
            raise RemoteProtocolError(f"digests of {frame.kind}, not of {own}")
        del self._awaited[part]
        if not is_there:
            done(b"", RouteLost(GPUFailed("the peer has it elsewhere")))
            return
        nbytes = target.nbytes

        def read(digest: bytes, error: BaseException | None) -> None:
            if error is None:
                self.progress.note(nbytes)
            done(digest, error)

        self._read(frame, target, read)

    @abc.abstractmethod
    def _is_there(self, frame: Sent, nbytes: int) -> bool:
        """Can a part of so many bytes be read where the peer says that it lies?

        :raises RemoteProtocolError: that is nowhere
        """

    @abc.abstractmethod
    def _read(
        self, frame: Sent, target: Memory | DeviceMemory, done: DoneCallback
    ) -> None:
        """Copy it in a task, compare it, and call ``done``. Never waits."""


class IpcRoute(ReadRoute):
    """What lies in ``memory`` of the peer's GPU, into memory of this side's own.

    That is the same GPU, or another one of the host. With ``is_kept`` the digest of a
    part that has landed is of all its bytes, whatever was compared. It is lost where
    the peer does not have a part there, or that cannot be read.
    """

    def __init__(
        self,
        memory: PeerMemory,
        pool: CopyPool,
        progress: Progress,
        digest: DigestMode,
        *,
        is_kept: bool = False,
        told: Sent | None = None,
    ) -> None:
        super().__init__(progress, digest, told)
        self._memory = memory
        self._pool = pool
        self._is_kept = is_kept

    def _is_there(self, frame: Sent, nbytes: int) -> bool:
        if frame.offset is None:
            return False
        self._memory.check(frame.offset, nbytes)
        return True

    def _read(
        self, frame: Sent, target: Memory | DeviceMemory, done: DoneCallback
    ) -> None:
        # Nothing else was received, or is there.
        place, offset = cast(DeviceMemory, target), cast(int, frame.offset)
        found = list[bytes]()

        def read(error: Exception | None) -> None:
            if error is None:
                done(found[0], None)
            elif isinstance(error, ChecksumError):
                done(b"", error)
            else:
                done(b"", RouteLost(error))

        copy = partial(self._copy, frame, found)
        self._reading.adopt(self._memory.read(offset, place, copy, read))

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


class MapRoute(ReadRoute):
    """One tensor in memory of the peer's host, which ``read`` copies and compares.

    ``lost`` is told why it cannot be read there.
    """

    is_to_gpu: ClassVar[bool] = False

    def __init__(
        self,
        read: Callable[[memoryview], Awaitable[None]],
        lost: Callable[[Exception], None],
        progress: Progress,
        digest: DigestMode,
        told: Sent,
    ) -> None:
        super().__init__(progress, digest, told)
        self._read_into = read
        self._lost = lost

    def _is_there(self, frame: Sent, nbytes: int) -> bool:
        return True  # it was claimed

    def _read(
        self, frame: Sent, target: Memory | DeviceMemory, done: DoneCallback
    ) -> None:
        if not isinstance(target, memoryview):
            raise TypeError("a tensor of a pipe lies in one place")
        reading = self._copy(frame, target, done)
        self._reading.own(reading, "asynckv: read a peer's memory")

    async def _copy(self, frame: Sent, target: memoryview, done: DoneCallback) -> None:
        error: Exception | None = None
        try:
            with self.progress.working(frame.transfer):
                await self._read_into(target)
        except ChecksumError as exc:
            error = exc
        except Exception as exc:  # noqa: BLE001 - whoever waits for it is told
            self._lost(exc)
            error = RouteLost(exc)
            clear_all_frames(exc)
        done(b"", error)
