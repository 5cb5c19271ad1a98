"""Peers of this host that read memory of this process where it lies.

Rule of this file: every function is plain. Memory that a peer was shown is pinned
until the peer says that it has no view of it, or the kernel says that it is gone; what
becomes of the entry, or of the link, is nothing to it. Memory of a GPU is one
allocation, shown on each link anew; what is put lies there for the buffer's side to
read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Final, Protocol

from asynckv.devices.arena import DeviceAllocation, DeviceArena, DeviceRegion
from asynckv.errors import ConfigError
from asynckv.links.fd_socket import FdConnection, FdDoor, has_fd_sockets
from asynckv.links.link import Link
from asynckv.protocol.handshake import DigestMode
from asynckv.protocol.transfer_frames import Exposed
from asynckv.protocol.values import Place
from asynckv.protocol.wire import Digester
from asynckv.sharing.mappings import PIN_NUMBER
from asynckv.tensors.arena import Hold, Region
from asynckv.tensors.paged_arena import PagedArena, SlabArena, SlabRegion
from asynckv.tensors.shared_file import SharedFile
from asynckv.tensors.slabs import PAGE_NBYTES

__all__ = (
    "LEAST_NBYTES",
    "MAX_PINS",
    "ExportedMemory",
    "Exporter",
    "Importer",
    "Pin",
    "SharedMemory",
    "edges_in",
    "place_of",
    "warn_of_loss",
)


LEAST_NBYTES: Final = 2 * 2**20
"""Of less CUDA shows the peer what lies beside it too."""


class ExportedMemory:
    """One allocation, which is not freed while this refers to it.

    What is sent for a ticket is nothing: the connection is what counts, whose end tells
    that the peer has let everything go, or is gone.
    """

    must_be_closed_there: ClassVar[bool] = True
    exports_parts: ClassVar[bool] = True

    _fd = -1  # until there is one: the process may have no more

    def __init__(self, allocation: DeviceAllocation) -> None:
        self.handle = allocation.handle
        self.gpu_uuid = allocation.uuid
        self.nbytes = allocation.memory.nbytes
        self.nonce = allocation.nonce
        self._allocation: DeviceAllocation | None = allocation
        self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        self.close()

    def fileno(self) -> int:
        """Return a descriptor that can be sent. It is open until :meth:`close`."""
        return self._fd

    def close(self) -> None:
        """Show it to nobody any more. Whoever holds this object holds the memory."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def drop(self) -> None:
        """Let the memory go: freed now, if the buffer has dropped it. In a thread.

        While an operation there waits for a peer it waits too, at most 5 s.
        """
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            with allocation.quiet().allocating():
                del allocation

    def edges(self, regions: Sequence[Region], places: Sequence[Place | None]) -> bytes:
        """Return the digest of the first and last bytes of what lies there.

        Empty where those of some tensor were never read back.
        """
        edges = [r.edges if isinstance(r, DeviceRegion) else b"" for r in regions]
        return edges_in(places, edges)


def edges_in(places: Sequence[Place | None], edges: Sequence[bytes]) -> bytes:
    """Return one digest of the generations, and the edges, of what has a place."""
    found = [
        (place.generation, edge)
        for place, edge in zip(places, edges, strict=True)
        if place is not None
    ]
    if not all(edge for _, edge in found):
        return b""
    digester = Digester()
    generations = [generation for generation, _ in found]
    digester.update(struct.pack(f"!{len(generations)}Q", *generations))
    for _, edge in found:
        digester.update(edge)
    return digester.digest()


def place_of(region: Region) -> Place | None:
    """Return where a region's bytes are in the file; ``None`` if they are not."""
    if not isinstance(region, SlabRegion) or region.pages is None:
        return None
    runs = region.pages.runs
    return Place(
        tuple([(first * PAGE_NBYTES, pages * PAGE_NBYTES) for first, pages in runs]),
        region.offset,
        region.generation,
    )


logger = logging.getLogger(__name__)

MAX_PINS: Final = 1024
"""A peer that keeps so many deliveries gets the next ones by its lanes."""

_LEAVE_S: Final = 2.0


class Pin:
    """Memory of one delivery that a peer may have views of."""

    __slots__ = ("_holds", "number", "regions")

    def __init__(self, number: int, regions: Sequence[Region]) -> None:
        self.number = number
        self.regions = len(regions)
        self._holds: list[Hold] = [region.hold() for region in regions]

    def end(self) -> None:
        """The peer has no view of it any more."""
        while self._holds:
            self._holds.pop().release()


class SharedMemory(Protocol):
    """What peers are shown: a memory file, or an allocation on a GPU."""

    nbytes: int
    nonce: bytes

    @property
    def handle(self) -> bytes:
        """What opens it, if a descriptor does not."""

    @property
    def gpu_uuid(self) -> str:
        """Which GPU it is on; empty if it is on none."""

    must_be_closed_there: ClassVar[bool]
    """Must the memory outlive what a peer has open of it?"""

    exports_parts: ClassVar[bool]
    """Can a part of a stream be read there before all of it has come?"""

    def fileno(self) -> int:
        """Return the descriptor that is sent for a ticket."""

    def edges(self, regions: Sequence[Region], places: Sequence[Place | None]) -> bytes:
        """Return the digest of the first and last bytes of what lies there."""

    def close(self) -> None:
        """Show it to nobody any more."""

    def drop(self) -> None:
        """Let the memory go too. Blocks: in a thread."""


class Importer:
    """One peer's mapping, made on one link, which it outlives.

    It ends with its connection: by then nothing there has the memory any more.
    """

    def __init__(self, exporter: Exporter, file: SharedMemory, peer_id: str) -> None:
        self.peer_id = peer_id
        self.exposed = Exposed("", b"", 0)
        """What it is told."""
        self.is_verified = False
        self._exporter = exporter
        self._file = file
        self._connection: FdConnection | None = None
        self._is_link_over = False
        self._last_number = 0
        self._pins: dict[int, Pin] = {}
        self.lost: Callable[[], None] = _nothing
        """Called when it has closed the memory, or is gone, before its link."""

    @property
    def is_connected(self) -> bool:
        """Has it the memory open, and its link too?"""
        is_mapped = self.is_verified and self._connection is not None
        return is_mapped and not self._is_link_over

    @property
    def is_usable(self) -> bool:
        """May one more delivery be read where it lies?"""
        return self.is_connected and len(self._pins) < MAX_PINS

    @property
    def pinned_regions(self) -> int:
        """Of how many tensors it may have views."""
        return sum(pin.regions for pin in self._pins.values())

    @property
    def memory_file(self) -> SharedMemory:
        """What it has mapped."""
        return self._file

    def verify(self, nonce: bytes) -> bool:
        """Has it read through its mapping what we have written?"""
        is_there = self._connection is not None
        self.is_verified = is_there and secrets.compare_digest(nonce, self._file.nonce)
        return self.is_verified

    def pin(self, regions: Sequence[Region]) -> Pin:
        """Let the peer have these, until it says otherwise."""
        self._last_number += 1
        pin = self._pins[self._last_number] = Pin(self._last_number, regions)
        return pin

    def unpin(self, number: int) -> None:
        """The peer does not have that pin, or not any more. Again is nothing."""
        pin = self._pins.pop(number, None)
        if pin is not None:
            pin.end()

    def link_over(self) -> None:
        """Its link is lost: nothing more is offered. What it has it keeps."""
        self._is_link_over = True
        self.lost = _nothing
        self._exporter.expel(self)
        self._close_if_over()

    def close(self) -> None:
        """Hang up: what the peer may have is let go."""
        self._exporter.expel(self)
        if self._connection is not None:
            self._connection.close()
        else:
            self._exporter.forget(self)

    def _close_if_over(self) -> None:
        is_there = self._connection is not None
        if is_there and self._file.must_be_closed_there:
            return  # it says that it has closed what it has by hanging up
        if self._is_link_over and not self._pins:
            self.close()

    def detach(self) -> None:
        """Hang up; what the peer may have stays its own for good.

        But where the peer has to close it first, that is waited for.
        """
        if self._connection is not None and self._file.must_be_closed_there:
            self._is_link_over = True
            return
        self._pins.clear()  # whose holds do not end
        self.close()

    def fileno(self) -> int:
        return self._file.fileno()

    def on_connected(self, connection: FdConnection) -> None:
        self._connection = connection

    def on_message(self, data: bytes) -> None:
        if len(data) % PIN_NUMBER.size:
            logger.warning("%s releases no pin we know of", self.peer_id)
            self.close()
            return
        for (number,) in PIN_NUMBER.iter_unpack(data):
            if number > self._last_number:
                logger.warning("%s releases what it was never shown", self.peer_id)
                self.close()
                return
            self.unpin(number)
        self._close_if_over()
        self._exporter.changed()

    def on_end(self) -> None:
        lost, self.lost = self.lost, _nothing
        self._connection = None
        while self._pins:
            self._pins.popitem()[1].end()
        self._exporter.forget(self)
        self._exporter.changed()
        lost()


def _nothing() -> None:
    pass


class Exporter:
    """Shows the memory of ``arena`` to peers of this host.

    ``changed`` is called when memory may have become free, ``drop`` with what nobody
    has open any more, to be dropped in a thread.
    """

    def __init__(
        self,
        arena: object,
        changed: Callable[[], None] = _nothing,
        drop: Callable[[SharedMemory], None] = lambda memory: None,
    ) -> None:
        self._drop = drop
        self._left: asyncio.Future[None] | None = None
        self._arena = arena if isinstance(arena, PagedArena) else None
        self.changed = changed
        self._door: FdDoor | None = None
        self._file: SharedMemory | None = None
        self._importers: set[Importer] = set()

    @property
    def mapped_by(self) -> dict[str, int]:
        """Of how many tensors each peer may have views, if it may of any."""
        found: dict[str, int] = {}
        for importer in self._importers:
            if count := importer.pinned_regions:
                found[importer.peer_id] = found.get(importer.peer_id, 0) + count
        return found

    def export(
        self,
        link: Link,
        digest: DigestMode,
        gpu_uuid: str = "",
        *,
        least_nbytes: int = 0,
    ) -> Importer:
        """Let one more peer open memory of the host; or of this side's GPU.

        Its own GPU has that name: whether it can reach this one CUDA tells it alone.

        :raises ConfigError: there is no such memory for it, or too little
        """
        # A handle is all that a process of this host needs, to write there too.
        is_here = link.may_map and (not gpu_uuid or link.own_host == link.peer_host)
        file = self._open(gpu_uuid) if is_here and has_fd_sockets() else None
        if file is None or self._door is None:
            what = "of a GPU to show" if gpu_uuid else "that could be mapped"
            raise ConfigError(f"this side has no memory {what}")
        importer = Importer(self, file, link.peer.id)
        importer.exposed = Exposed(
            address=self._door.address,
            ticket=self._door.admit(importer),
            nbytes=file.nbytes,
            handle=file.handle,
            digest=digest,
            gpu_uuid=file.gpu_uuid,
        )
        self._importers.add(importer)
        if file.nbytes < least_nbytes:
            importer.close()
            raise ConfigError("this side has too little memory of a GPU to show")
        link.call_when_lost(lambda _: importer.link_over())
        return importer

    def _open(self, gpu_uuid: str) -> SharedMemory | None:
        make = _memory_of(self._arena, is_on_gpu=bool(gpu_uuid))
        if make is None:
            return None
        try:
            self._file = self._file or make()
            self._door = self._door or FdDoor()
        except OSError as exc:
            # Not the error: whoever keeps the record would keep the memory.
            logger.warning("peers cannot map this buffer's memory: %s", str(exc))
            return None
        return self._file

    def expel(self, importer: Importer) -> None:
        """It gets no file any more."""
        if self._door is not None:
            self._door.expel(importer.exposed.ticket)

    def forget(self, importer: Importer) -> None:
        """It has nothing of ours. With the last one the door is closed."""
        self._importers.discard(importer)
        if not self._importers:
            self._close_door()
            self._close_file()
            if self._left is not None and not self._left.done():
                self._left.set_result(None)

    def close(self) -> None:
        """The memory is not used again: nobody needs to say what he has of it."""
        self._arena = None
        for importer in list(self._importers):
            importer.detach()
        self._close_door()
        if not self._importers:
            self._close_file()

    async def aclose(self) -> None:
        """Wait, at most 2 s, for peers that have to close memory before it is freed.

        One that keeps views of it, or stands still, keeps the memory.
        """
        if self._importers:
            self._left = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._left}, timeout=_LEAVE_S)

    def _close_door(self) -> None:
        door, self._door = self._door, None
        if door is not None:
            door.close()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
            if file.must_be_closed_there:
                self._drop(file)


def _memory_of(arena: object, *, is_on_gpu: bool) -> Callable[[], SharedMemory] | None:
    """Return what exports memory of the host, or of a GPU, if there is any."""
    if not is_on_gpu:
        slabs = arena.pages.open_slabs() if isinstance(arena, SlabArena) else None
        return None if slabs is None else partial(SharedFile, slabs)
    if not isinstance(arena, DeviceArena) or not arena.pages.is_open:
        return None
    allocation = arena.pages.allocation
    return partial(ExportedMemory, allocation) if allocation.handle else None


_TELL_S: Final = 0.1


def warn_of_loss(
    link: Link, what: str, reason: str, way: str = "goes through host memory"
) -> None:
    """Warn soon that payload goes another way now. Never waits.

    A peer that is gone has closed its link too: that is no news.
    """
    loop = asyncio.get_running_loop()
    loop.call_later(_TELL_S, _warn_of_loss, link, what, reason, way)


def _warn_of_loss(link: Link, what: str, reason: str, way: str) -> None:
    if link.is_open:
        logger.warning("%s %s %s from here on: %s", what, link.peer.id, way, reason)
