"""A peer's memory of a GPU that this process reads where it lies, by CUDA IPC.

As :mod:`~asynckv.sharing.mappings`, with two more rules: an allocation is open once
in a process, and the peer may free it only when we have closed it. So the connection
whose ticket came along is open for as long as the memory is: its end tells the peer
that it may free it, or use it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from asynckv.errors import (
    AsyncKVError,
    ChecksumError,
    GPUFailed,
    NotServed,
    PeerLost,
    RemoteProtocolError,
)
from asynckv.links.device_streams import open_devices
from asynckv.links.gpu_link import GpuLink
from asynckv.links.link import Link
from asynckv.protocol.handshake import strictest
from asynckv.protocol.transfer_frames import OpenIpc
from asynckv.protocol.values import Place
from asynckv.sharing.exports import Export, check_same_host, open_export
from asynckv.sharing.handshake import GPU, Handshake
from asynckv.sharing.mappings import (
    MAP_S,
    MappedMemory,
    MappedPin,
    Mappings,
)
from asynckv.sharing.owner import ShownSources
from asynckv.shielding import clear_all_frames
from asynckv.tensors.cuda import DeviceMemory, Event
from asynckv.tensors.device_pages import DeviceAllocation, DevicePages
from asynckv.tensors.device_tensors import Gpus
from asynckv.tensors.devices import Device
from asynckv.tensors.growth import Growth
from asynckv.tensors.imports import ImportedAllocation, in_thread
from asynckv.tensors.packing import ALIGNMENT_NBYTES
from asynckv.tensors.private_pages import Claim
from asynckv.tensors.slabs import PAGE_NBYTES

if TYPE_CHECKING:
    from asynckv.sharing.owner import MapDigest, MapHolder

__all__ = (
    "GpuImports",
    "ImportedFile",
    "ImportedMemory",
    "PeerMemory",
    "Read",
)


logger = logging.getLogger(__name__)

_LOOK_AGAIN_S: Final = 1e-3


class ImportedFile:
    """An imported allocation, with the face of a mapped file."""

    def __init__(self, allocation: ImportedAllocation, gpus: Gpus) -> None:
        self.allocation = allocation
        self.gpus = gpus
        self.nbytes = allocation.nbytes + PAGE_NBYTES
        """As of a file, whose last page is no tensor's."""

    def part(self, place: Place, nbytes: int, owner: object) -> DeviceMemory:
        """Return where a place lies, that was checked; it keeps ``owner`` alive."""
        start = place.start + (place.runs[0][0] if place.runs else 0)
        part = self.allocation.memory.part(start, start + nbytes)
        return dataclasses.replace(part, owner=owner)


class ImportedMemory(MappedMemory):
    """What one link shows of its peer's memory of a GPU. It outlives the link.

    ``own`` is memory of this side's own there: the GPU's work on views is marked by it.
    """

    @property
    def gpus(self) -> Gpus:
        """What the memory is opened by."""
        return self.imported.gpus

    def __init__(
        self,
        opened: Export,
        digest: MapDigest,
        own: DeviceAllocation,
    ) -> None:
        self.imported = ImportedFile(opened.allocation, own.gpus)
        # No file: whoever reads parts of it overrides what reads a file's.
        super().__init__(opened.sock, self.imported, digest)  # type: ignore[arg-type]
        self._export = opened
        self._ours: DeviceAllocation | None = own
        self._handed_out: dict[int, object] = {}
        self._going: set[int] = set()
        self._is_hung_up = False
        self.closed: asyncio.Future[None] = self._loop.create_future()
        """Done when the memory is closed here, and the peer told."""

    @property
    def has_views(self) -> bool:
        """Has anybody here any? Those that the GPU is not done with do not count."""
        return len(self._live) > len(self._going)

    def take(self, number: int) -> MappedPin:
        pin = super().take(number)
        device = self.imported.allocation.memory.device
        self._handed_out[number] = self.gpus.tensors.stream_of(device)
        return pin

    def let_go(self, number: int, claim: Claim | None = None) -> None:
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
            self._loop.call_soon_threadsafe(self._let_go_later, number, fence)
        except RuntimeError:  # the loop is closed, and looks at nothing any more
            with contextlib.suppress(GPUFailed):
                fence.synchronize()
                self._let_go_now(number, fence)

    def _let_go_later(self, number: int, fence: Event) -> None:
        try:
            is_over = fence.query()
        except GPUFailed:
            return
        if is_over:
            self._let_go_now(number, fence)
        else:
            self._loop.call_later(_LOOK_AGAIN_S, self._let_go_later, number, fence)

    def _let_go_now(self, number: int, fence: Event) -> None:
        fence.close()
        self._going.discard(number)
        self._handed_out.pop(number, None)
        super().let_go(number)

    def _hang_up(self) -> None:
        """On the loop, or without one."""
        if self._is_hung_up:
            return
        self._is_hung_up = True
        if self._loop.is_closed():
            self._close_now()
        else:
            in_thread(self._close_now)

    def _close_now(self) -> None:
        self._ours = None  # whoever keeps this object keeps no memory
        self._export.close()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(_set_done, self.closed)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class GpuImports:
    """Opens the memory of one peer on each link, or a way from its GPU to this one.

    Else it maps the peer's memory of the host, if that is this one. ``growth`` is this
    side's own; ``url`` may name another way than NCCL.
    """

    def __init__(
        self,
        growth: Growth,
        digest: MapDigest,
        boot_id: str,
        *,
        device_digest: MapDigest = "full",
        url: str = "",
    ) -> None:
        self._sources = ShownSources(growth, digest)
        self._is_forced = "payload=" in url
        self._host = Mappings(digest, boot_id, is_forced="payload=map" in url)
        self._ways: weakref.WeakKeyDictionary[Link, GpuLink] = (
            weakref.WeakKeyDictionary()
        )
        self._growth = growth
        self._digest: MapDigest = digest
        self._device_digest: MapDigest = device_digest
        self._boot_id = boot_id
        self._of_links: weakref.WeakKeyDictionary[Link, ImportedMemory] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, link: Link) -> MappedMemory | None:
        """Return what ``link`` shows of the memory of entries, if it does."""
        return self._of_links.get(link) or self._host.of(link)

    def holder(self, link: Link) -> MapHolder | None:
        """Return who reads what is put there in memory of the GPU, if somebody does."""
        return self._sources.holder(link)

    def way(self, link: Link) -> GpuLink | None:
        """Return by what payload goes from the peer's GPU to this one, if it does."""
        way = self._ways.get(link)
        return way if way is not None and way.is_open else None

    def leave(self, link: Link) -> None:
        """End a link that was not opened: now, or when no GPU waits for this one."""
        if (way := self._ways.get(link)) is not None:
            way.call_when_opened(link.abort)
        else:
            link.abort()

    def close(self) -> None:
        """Forget what is mapped. What else there is, links and views keep."""
        self._host.close()
        self._sources.close()

    async def aclose(self) -> None:
        """Wait until what nobody has views of is closed, at most 2 s."""
        for way in list(self._ways.values()):
            await way.aclose()
        over = [x.closed for x in self._of_links.values() if not x.has_views]
        if over:
            await asyncio.wait(over, timeout=MAP_S)
        await self._sources.aclose()

    async def open(self, link: Link) -> None:
        """Open the memory at the other end of ``link``, if that is the same GPU's.

        If it is not, open a way from another GPU. If that cannot be, one line of the
        log says why (at debug where no entries are served), and payload moves as to a
        peer in host memory: by mappings, or by lanes. Waits at most 2 s for the memory
        and for a mapping, 2 s until the peer has opened what is inserted from, and 10 s
        for a live peer; a cancelled call leaves nothing behind.

        :raises IncompatiblePeer: it cannot be mapped, and no other way is wanted
        :raises PeerLost: the link was lost meanwhile
        :raises GPUUnavailable: this side has no GPU
        """
        await self._growth.open()
        pages = self._growth.device_pages
        if pages is None or link.transport_name == "mem":
            return
        try:
            why_not, level = await self._open_gpu(link, pages), logging.INFO
        except NotServed as exc:  # there are no entries to read
            why_not, level = str(exc), logging.DEBUG
        if not why_not:
            return
        logger.log(
            level,
            "payload of the link to %s goes through host memory: %s",
            *(link.peer.id, why_not),
        )
        await self._host.open(link)

    async def _open_gpu(self, link: Link, pages: DevicePages) -> str:
        """Return why neither the peer's memory nor a way from its GPU is open, if so.

        :raises NotServed: the peer serves no entries
        """
        own = pages.allocation
        why_not = await _reason(link, self._open_memory(link, own))
        if not why_not:
            await self._show(link, own.uuid)
            return ""
        no_way = await _reason(link, self._open_way(link, pages.device))
        if not no_way:
            return ""
        return f"its memory of a GPU cannot be opened: {why_not}; nor NCCL: {no_way}"

    async def _show(self, link: Link, uuid: str) -> None:
        if self._is_forced:
            return
        if why_not := await _reason(link, self._sources.show(link, uuid)):
            logger.info(
                "what is put at %s goes through host memory: %s",
                *(link.peer.id, why_not),
            )

    async def _open_memory(self, link: Link, own: DeviceAllocation) -> None:
        self._check_here(link)
        self._of_links[link] = memory = await self._agree(link, own)
        link.call_when_lost(lambda _: memory.link_over())
        link.use_ipc()
        logger.info("entries at %s are read in its memory of a GPU", link.peer.id)

    async def _open_way(self, link: Link, device: Device) -> None:
        if self._is_forced:
            raise ValueError("the URL asks for another way")
        self._ways[link] = way = await GpuLink.make(link, device, self._device_digest)
        # It refers to its link: as long as it is known here, neither is collected.
        way.call_when_closed(lambda: self._forget(link))
        await way.open(open_devices(link, way.transport))

    def _forget(self, link: Link) -> None:
        self._ways.pop(link, None)

    def _check_here(self, link: Link) -> None:
        if not link.may_map:
            raise ValueError("no memory is shared with it")
        check_same_host(link, self._boot_id)

    async def _agree(self, link: Link, own: DeviceAllocation) -> ImportedMemory:
        opened = None
        try:
            with Handshake.ask(GPU, link, OpenIpc(own.uuid)) as handshake:
                async with asyncio.timeout(MAP_S):
                    exported = await handshake.exposed
                    opened, nonce = await open_export(exported, own)
                handshake.prove(nonce)
                # From here on the peer may offer what only this memory can show.
                await handshake.wait_accepted(link)
        except BaseException:
            if opened is not None:
                opened.close_soon()
            raise
        digest = strictest(self._digest, exported.digest)
        return ImportedMemory(opened, digest, own)


async def _reason(link: Link, opening: Coroutine[Any, Any, None]) -> str:
    """Return why something was not opened; empty if it was.

    :raises NotServed: the peer serves no entries
    :raises PeerLost: the link was lost meanwhile
    """
    try:
        await opening
    except NotServed:
        raise
    except (AsyncKVError, OSError, ValueError, TimeoutError) as exc:
        if isinstance(exc, PeerLost) and not link.is_open:
            raise
        return str(exc) or "no answer"  # whoever keeps the error keeps the memory
    return ""


_CLOSE_S: Final = 2.0

Read: TypeAlias = Callable[[DeviceMemory, DeviceMemory], Awaitable[None]]
"""Copies from the first place to the second, and compares what has landed.

It raises ``ChecksumError`` if those are other bytes, and anything else if they cannot
be read.
"""


class PeerMemory:
    """What one link has open of its peer's, from :meth:`put` on.

    ``failed`` is told why something cannot be read.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._export: Export | None = None
        self._reads: set[asyncio.Task[None]] = set()
        self._is_over = False
        self._closed: asyncio.Future[None] | None = None

    def put(self, export: Export) -> None:
        """Use that from here on; it is closed at once if nobody wants it any more."""
        self._export = export
        self._close_if_over()

    def check(self, offset: int, nbytes: int) -> None:
        """Check that a tensor lies in what the peer has shown.

        :raises RemoteProtocolError: it lies beyond, or where no tensor begins
        """
        end = offset + nbytes
        if self._export is not None and end > self._export.allocation.nbytes:
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
        task = asyncio.get_running_loop().create_task(
            self._read(offset, target, copy, done), name="asynckv: read a peer's GPU"
        )
        self._reads.add(task)
        task.add_done_callback(self._on_read)
        return task

    def close(self) -> None:
        """Close it when nothing reads it. Never waits."""
        self._is_over = True
        self._close_if_over()

    async def aclose(self) -> None:
        """Read nothing more, and wait until it is closed, 2 s at most."""
        for task in self._reads:
            task.cancel()
        self.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                if self._reads:
                    await asyncio.wait(set(self._reads))
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
            if self._export is None:
                raise PeerLost("the peer's memory is closed")
            memory = self._export.allocation.memory
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

    def _on_read(self, task: asyncio.Task[None]) -> None:
        self._reads.discard(task)
        self._close_if_over()

    def _close_if_over(self) -> None:
        export = self._export
        if export is None or self._reads or not self._is_over:
            return
        self._export = None
        loop = asyncio.get_running_loop()
        closed = self._closed = loop.create_future()

        def close() -> None:
            export.close()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(closed.set_result, None)

        in_thread(close)
