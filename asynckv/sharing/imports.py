"""A peer's memory of a GPU, open here: kept while it is read, or while views live.

As :mod:`~asynckv.sharing.mappings`, with two more rules: an allocation is open once
in a process, and the peer may free it only when we have closed it. So the connection
whose ticket came along is open for as long as the memory is: its end tells the peer
that it may free it, or use it again.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from asynckv.affinity import ProcessBound
from asynckv.devices.arena import MARK_NBYTES, DeviceAllocation
from asynckv.devices.cuda import IPC_HANDLE_NBYTES, DeviceMemory, Event
from asynckv.devices.imports import (
    ImportedAllocation,
    in_thread,
    open_allocation,
    set_done,
)
from asynckv.devices.tensors import Gpus
from asynckv.errors import ChecksumError, GPUFailed, PeerLost, RemoteProtocolError
from asynckv.links.fd_socket import fetch_file, hang_up
from asynckv.protocol.handshake import DigestMode, strictest
from asynckv.protocol.transfer_frames import Exposed
from asynckv.protocol.values import Place
from asynckv.sharing.mappings import MappedMemory, MappedPin
from asynckv.tensors.pages import ALIGNMENT_NBYTES
from asynckv.tensors.slabs import PAGE_NBYTES
from asynckv.tensors.stitching import Claim
from asynckv.waits.waiting import OwnTasks, clear_all_frames

__all__ = ("GpuImport", "ImportedMemory", "PeerMemory", "Read", "import_gpu")

_MAX_NBYTES: Final = 2**44
"""No GPU has more: what lies beyond would be anybody's."""

_LOOK_AGAIN_S: Final = 1e-3
_ASKED_AT_ONCE: Final = 256
_MOST_WAITING: Final = 16
_CLOSE_S: Final = 2.0


class GpuImport(ProcessBound):
    """One allocation of a peer's, open here, and the connection that says so.

    It has the face of a mapped file.
    """

    def __init__(
        self,
        sock: socket.socket,
        allocation: ImportedAllocation,
        gpus: Gpus,
        *,
        is_near: bool = True,
    ) -> None:
        self._own()
        self.sock = sock
        self.allocation = allocation
        self.gpus = gpus
        self.is_near = is_near
        """Is it of this side's own GPU? Torch has no views of another one's."""
        self.nbytes = allocation.nbytes + PAGE_NBYTES
        """As of a file, whose last page is no tensor's."""

    def part(self, place: Place, nbytes: int, owner: object) -> DeviceMemory:
        """Return where a place lies, that was checked; it keeps ``owner`` alive."""
        start = place.start + (place.runs[0][0] if place.runs else 0)
        part = self.allocation.memory.part(start, start + nbytes)
        return dataclasses.replace(part, owner=owner)

    def close(self) -> None:
        """Close the memory, then hang up: the peer counts on that. In a thread.

        Nothing in a forked child, where the memory is not open.
        """
        if not self._is_copy:
            self.allocation.release()
            hang_up(self.sock)

    def close_soon(self, closed: asyncio.Future[None]) -> None:
        """As :meth:`close`, in a thread of its own; tell ``closed``.

        Called in any thread, also by finalizers: it may be one that opens memory.
        """

        def close() -> None:
            self.close()
            set_done(closed)

        in_thread(close)


async def import_gpu(
    exposed: Exposed, own: DeviceAllocation
) -> tuple[GpuImport, bytes]:
    """Open what a peer has exported, for the GPU of ``own``; return its nonce too.

    Bounded by the caller's deadline. A cancelled call leaves nothing behind: the peer
    is hung up on, and may free the memory, when the thread here has closed it.

    :raises PeerLost: nobody is where the ticket is good, or hung up
    :raises AuthError: that is another user's
    :raises RemoteProtocolError: that is no place for a ticket, or no allocation
    :raises GPUFailed: it cannot be opened, or is this process's own; or one GPU cannot
        reach the other
    """
    _check(exposed)
    sock, fd = await fetch_file(exposed.address, exposed.ticket)
    os.close(fd)
    owner = os.getpid()

    def ended() -> None:
        if os.getpid() == owner:
            hang_up(sock)

    cuda, device = own.gpus.cuda, own.memory.device
    allocation, nonce = await open_allocation(
        cuda, device, exposed.handle, exposed.nbytes, ended
    )
    is_near = exposed.gpu_uuid == own.uuid
    return GpuImport(sock, allocation, own.gpus, is_near=is_near), nonce


def _check(exposed: Exposed) -> None:
    """Check what a peer claims to have exported, before any of it is opened.

    That it has so many bytes CUDA alone can tell. What the peer says later is checked
    against the size that it has claimed here.

    :raises RemoteProtocolError: no handle, or no allocation, is like that
    """
    if len(exposed.handle) != IPC_HANDLE_NBYTES:
        raise RemoteProtocolError(f"a handle of {len(exposed.handle)} bytes is none")
    nbytes = exposed.nbytes - MARK_NBYTES
    if nbytes < PAGE_NBYTES or nbytes % PAGE_NBYTES or nbytes > _MAX_NBYTES:
        raise RemoteProtocolError(f"nobody exports {exposed.nbytes} bytes of a GPU")


class ImportedMemory(MappedMemory):
    """What one link shows of its peer's memory of a GPU. It outlives the link.

    ``own`` is memory of this side's own: its GPU's work on views is marked by it.
    """

    @property
    def gpus(self) -> Gpus:
        """What the memory is opened by."""
        return self.imported.gpus

    def __init__(
        self, imported: GpuImport, digest: DigestMode, own: DeviceAllocation
    ) -> None:
        self.imported = imported
        # No file: whoever reads parts of it overrides what reads a file's.
        super().__init__(imported.sock, imported, digest)  # type: ignore[arg-type]
        self._ours: DeviceAllocation | None = own
        self._handed_out: dict[int, object] = {}
        self._going: set[int] = set()
        self._fences: collections.deque[tuple[int, Event]] = collections.deque()
        """What the GPU is to reach before they are gone."""
        self._looking: asyncio.TimerHandle | None = None
        self._is_draining = False
        self._is_hung_up = False
        self.closed: asyncio.Future[None] = self._loop.create_future()

    @property
    def has_views(self) -> bool:
        """Has anybody here any? Those that the GPU is not done with do not count."""
        return len(self._live) > len(self._going)

    def closing(self) -> asyncio.Future[None] | None:
        return None if self.has_views else self.closed

    def take(self, number: int) -> MappedPin:
        pin = super().take(number)
        device = self.imported.allocation.memory.device
        self._handed_out[number] = self.gpus.tensors.stream_of(device)
        return pin

    def release(self, number: int, claim: Claim | None = None) -> None:
        """The last view of it is gone. Called by finalizers: in any thread.

        The GPU may still read there: the peer is told when it does not any more.
        """
        if self._is_copy or self._ours is None:
            return
        try:
            fence = self._ours.fence(self._handed_out[number])
        except GPUFailed:
            return  # nobody can know when the GPU leaves it: it stays the peer's loss
        self._going.add(number)
        try:
            # Not asked here: a finalizer may have come in the middle of another call.
            self._loop.call_soon_threadsafe(self._release_later, number, fence)
        except RuntimeError:  # the loop is closed, and looks at nothing any more
            self._fences.append((number, fence))
            if not self._is_draining:
                self._is_draining = True
                in_thread(self._release_when_reached)

    def _release_when_reached(self) -> None:
        """Release what no loop looks at. The thread ends when nothing is left."""
        while self._fences:
            with contextlib.suppress(IndexError):
                while True:
                    number, fence = self._fences.popleft()
                    with contextlib.suppress(GPUFailed):
                        fence.synchronize()
                        self._release_now(number, fence)
            self._is_draining = False  # what comes now starts another thread

    def _release_later(self, number: int, fence: Event) -> None:
        self._fences.append((number, fence))
        if self._looking is None:
            self._look()

    def _look(self) -> None:
        """Ask for all fences, but only for a few that are not reached, in turn."""
        self._looking, waiting = None, 0
        for _ in range(min(len(self._fences), _ASKED_AT_ONCE)):
            number, fence = self._fences.popleft()
            try:
                is_over = fence.query()
            except GPUFailed:
                continue  # as above
            if is_over:
                self._release_now(number, fence)
                continue
            self._fences.append((number, fence))
            waiting += 1
            if waiting == _MOST_WAITING:
                break
        if self._fences:
            pause_s = _LOOK_AGAIN_S if waiting else 0.0
            self._looking = self._loop.call_later(pause_s, self._look)

    def _release_now(self, number: int, fence: Event) -> None:
        fence.close()
        self._going.discard(number)
        self._handed_out.pop(number, None)
        super().release(number)

    def _hang_up(self) -> None:
        """On the loop, or without one."""
        if not self._is_hung_up:
            self._is_hung_up = True
            self._ours = None  # whoever keeps this object keeps no memory
            self.imported.close_soon(self.closed)


Read: TypeAlias = Callable[[DeviceMemory, DeviceMemory], Awaitable[None]]
"""Copies from the first place to the second, and compares what has landed.

It raises ``ChecksumError`` if those are other bytes, and anything else if they cannot
be read.
"""


class PeerMemory:
    """What one link has open of its peer's, from :meth:`open` on.

    ``failed`` is told why something cannot be read. ``digest`` is what this side wants
    to be compared; once it is open, what both do.
    """

    def __init__(
        self, failed: Callable[[Exception], None], digest: DigestMode = "edges"
    ) -> None:
        self.digest: DigestMode = digest
        self._failed = failed
        self._imported: GpuImport | None = None
        self._reads = OwnTasks(all_ended=self._close_if_over)
        self._is_over = False
        self._closed: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it can be read."""
        return self._imported is not None and not self._is_over

    async def open(self, exposed: Exposed, own: DeviceAllocation) -> bytes:
        """Open what the peer has exported; return its nonce. As :func:`import_gpu`."""
        imported, nonce = await import_gpu(exposed, own)
        self.digest = strictest(self.digest, exposed.digest)
        self.put(imported)
        return nonce

    def put(self, imported: GpuImport) -> None:
        """Use that from here on; it is closed at once if nobody wants it any more."""
        self._imported = imported
        self._close_if_over()

    def check(self, offset: int, nbytes: int) -> None:
        """Check that a tensor lies in what the peer has shown.

        :raises RemoteProtocolError: it lies beyond, or where no tensor begins
        """
        end = offset + nbytes
        if self._imported is not None and end > self._imported.allocation.nbytes:
            raise RemoteProtocolError("a tensor beyond the memory that was exported")
        if offset % ALIGNMENT_NBYTES:
            raise RemoteProtocolError(f"a tensor at {offset} bytes: not aligned")

    def read(
        self,
        offset: int,
        target: DeviceMemory,
        copy: Read,
        done: Callable[[Exception | None], None],
    ) -> asyncio.Task[None]:
        """Copy what lies there to ``target``; ``done`` is told why it is not there.

        If the task is cancelled it is told nothing; it ends when the GPU is done with
        both places. Never waits.
        """
        reading = self._read(offset, target, copy, done)
        return self._reads.own(reading, "asynckv: read a peer's GPU")

    def close(self) -> None:
        """Close it when nothing reads it. Never waits."""
        self._is_over = True
        self._close_if_over()

    async def aclose(self) -> None:
        """Read nothing more, and wait until it is closed, 2 s at most."""
        self._reads.cancel()
        self.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._reads.wait()
                if self._closed is not None:
                    await asyncio.wait({self._closed})

    async def _read(
        self,
        offset: int,
        target: DeviceMemory,
        copy: Read,
        done: Callable[[Exception | None], None],
    ) -> None:
        try:
            if self._imported is None:
                raise PeerLost("the peer's memory is closed")
            memory = self._imported.allocation.memory
            source = memory.part(offset, offset + target.nbytes)
            await copy(source, target)
        except Exception as exc:  # noqa: BLE001 - whoever waits for it is told
            clear_all_frames(exc)  # they keep both places
            memory = source = target = copy = None  # type: ignore[assignment]
            if not isinstance(exc, ChecksumError):
                self._failed(exc)
            done(exc)
        else:
            done(None)

    def _close_if_over(self) -> None:
        imported = self._imported
        if imported is not None and self._is_over and not len(self._reads):
            self._imported = None
            self._closed = asyncio.get_running_loop().create_future()
            imported.close_soon(self._closed)
