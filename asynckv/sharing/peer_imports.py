"""What the links of one peer lead to, opened on this side: its memory, or its GPU.

Each link opens it anew, before anything is asked on it, and nothing fails without it:
one line of the log says why payload goes another way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final, NamedTuple

from asynckv.devices.arena import DeviceAllocation, DevicePages
from asynckv.devices.growth import Growth
from asynckv.devices.names import Device
from asynckv.errors import AsyncKVError, IncompatiblePeer, NotServed, PeerLost
from asynckv.links.fd_socket import fetch_file
from asynckv.links.link import Link
from asynckv.protocol.handshake import DigestMode, strictest
from asynckv.protocol.transfer_frames import Exposed, OpenMemory
from asynckv.sharing.exporter import LEAST_NBYTES, Exporter, Importer, warn_of_loss
from asynckv.sharing.gpu_channel import GpuLink
from asynckv.sharing.handshake import Handshake
from asynckv.sharing.imports import ImportedMemory, import_gpu
from asynckv.sharing.mappings import MappedMemory
from asynckv.tensors.shared_file import MappedFile

__all__ = ("OPEN_S", "PeerImports", "check_same_host")

logger = logging.getLogger(__name__)

OPEN_S: Final = 2.0
"""What two processes of one host need at most to agree; else lanes do."""


_EXPORT_S: Final = 2.0
"""Until the peer has opened what is put from; else that goes through the hosts."""

_BY_HOST: Final = "goes through host memory"
_CLOSED_THERE: Final = "the peer has closed memory of this side's GPU"
_BY_LANES: Final = "moves by lanes: its memory cannot be mapped"


class PeerImports:
    """Opens the memory of one peer on each link: the host's, each file only once.

    With a ``growth`` of this side's own, on a GPU, it opens memory of a GPU of the same
    host, and lets the peer read what is put in its own; or a way from another GPU to
    this one by NCCL; or memory of the host, where neither can be. ``url`` may ask for
    less, or for a mapping alone. ``digest`` is what this side wants to be compared, and
    ``device_digest`` of what comes by NCCL.
    """

    def __init__(
        self,
        digest: DigestMode,
        boot_id: str,
        *,
        url: str = "",
        growth: Growth | None = None,
        device_digest: DigestMode = "full",
    ) -> None:
        self._digest: DigestMode = digest
        self._device_digest: DigestMode = device_digest
        self._boot_id = boot_id
        self._url = url
        self._growth = growth
        self._exporter: Exporter | None = None
        if growth is not None:
            self._exporter = Exporter(growth.arena, drop=growth.drop_soon)
        self._importers: weakref.WeakKeyDictionary[Link, Importer] = (
            weakref.WeakKeyDictionary()
        )
        self._file: MappedFile | None = None
        self._ways: weakref.WeakKeyDictionary[Link, GpuLink] = (
            weakref.WeakKeyDictionary()
        )
        self._of_links: weakref.WeakKeyDictionary[Link, MappedMemory] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, link: Link) -> MappedMemory | None:
        """Return what ``link`` shows of the memory of entries, if it does."""
        return self._of_links.get(link)

    def importer(self, link: Link) -> Importer | None:
        """Return who reads what is put there in memory of the GPU, if somebody does."""
        importer = self._importers.get(link)
        return importer if importer is not None and importer.is_usable else None

    def way(self, link: Link) -> GpuLink | None:
        """Return by what payload goes from the peer's GPU to this one, if it does."""
        way = self._ways.get(link)
        return way if way is not None and way.is_open else None

    def detach(self, link: Link) -> None:
        """End a link that was not opened: now, or when no GPU waits for this one."""
        if (way := self._ways.get(link)) is not None:
            way.call_when_opened(link.abort)
        else:
            link.abort()

    def close(self) -> None:
        """Forget what is mapped. What else there is, links and views keep."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
        if self._exporter is not None:
            self._exporter.close()

    async def aclose(self) -> None:
        """Close it, and wait until what nobody has views of is closed, at most 2 s."""
        self.close()
        for way in list(self._ways.values()):
            await way.aclose()
        every = [memory.closing() for memory in self._of_links.values()]
        if closing := [one for one in every if one is not None]:
            await asyncio.wait(closing, timeout=OPEN_S)
        if self._exporter is not None:
            await self._exporter.aclose()

    async def open(self, link: Link) -> None:
        """Open what there is at the other end of ``link``.

        If nothing can be, one line of the log says why, at debug where no entries are
        served. Waits at most 2 s for memory of a GPU and for a mapping, 2 s until the
        peer has opened what is put from, and 10 s for a live peer's last word; a
        cancelled call leaves nothing behind.

        :raises IncompatiblePeer: it cannot be mapped, and no other way is wanted
        :raises PeerLost: the link was lost meanwhile
        :raises GPUUnavailable: this side is to use a GPU, and has none
        """
        if self._growth is not None:
            await self._growth.open()
            pages = self._growth.device_pages
            if pages is not None and link.transport_name != "mem":
                if (why_not := await self._open_gpu(link, pages)) is None:
                    return
                why_not.log("payload of the link to", link, _BY_HOST)
        if not link.may_map:
            return
        if (why_not := await _why_not(link, self._map(link))) is None:
            return
        if "payload=map" in self._url:
            raise IncompatiblePeer(
                f"the memory of {link.peer.id} cannot be mapped: {why_not.text}",
                field="payload_paths",
                hint="leave ?payload=map out of the URL, and lanes are used",
            )
        why_not.log("payload of the link to", link, _BY_LANES)

    async def _open_gpu(self, link: Link, pages: DevicePages) -> _WhyNot | None:
        own = pages.allocation
        why_not = await _why_not(link, self._open_memory(link, own))
        if why_not is None:
            if self._exporter is not None and "payload=" not in self._url:
                exporting = self._export(link, self._exporter, own.uuid)
                if (reason := await _why_not(link, exporting)) is not None:
                    reason.log("what is put at", link, _BY_HOST)
            return None
        if not why_not.is_served:
            return why_not
        no_way = await _why_not(link, self._open_way(link, pages.device))
        if no_way is None:
            return None
        return _WhyNot(
            f"its memory of a GPU cannot be opened: {why_not.text}; "
            f"nor NCCL: {no_way.text}"
        )

    async def _export(self, link: Link, exporter: Exporter, uuid: str) -> None:
        """Let the other end of ``link`` read what is put in memory of that GPU."""
        importer = exporter.export(link, self._digest, uuid, least_nbytes=LEAST_NBYTES)
        with Handshake.ask(link, OpenMemory("inserts", uuid)) as handshake:
            async with asyncio.timeout(_EXPORT_S):
                await handshake.export(importer)
        self._importers[link] = importer
        importer.lost = partial(warn_of_loss, link, "what is put at", _CLOSED_THERE)
        logger.info("what is put at %s is read in memory of a GPU", link.peer.id)

    async def _open_memory(self, link: Link, own: DeviceAllocation) -> None:
        self._check_here(link)
        request = OpenMemory("lookup", own.uuid)
        await self._import(link, request, partial(self._import_gpu, own))
        link.use_ipc()
        logger.info("entries at %s are read in its memory of a GPU", link.peer.id)

    async def _map(self, link: Link) -> None:
        self._check_here(link)
        await self._import(link, OpenMemory("lookup"), self._import_file)
        link.use_map()
        logger.info("entries at %s are read in its memory of the host", link.peer.id)

    async def _open_way(self, link: Link, device: Device) -> None:
        if "payload=" in self._url:
            raise ValueError("the URL asks for another way")
        self._ways[link] = way = await GpuLink.make(link, device, self._device_digest)
        # It refers to its link: as long as it is known here, neither is collected.
        way.call_when_closed(lambda: self._forget(link))
        await way.ask()

    def _forget(self, link: Link) -> None:
        self._ways.pop(link, None)

    def _check_here(self, link: Link) -> None:
        if not link.may_map:
            raise ValueError("no memory is shared with it")
        check_same_host(link, self._boot_id)

    async def _import(
        self,
        link: Link,
        request: OpenMemory,
        import_it: Callable[[Exposed], Awaitable[tuple[MappedMemory, bytes]]],
    ) -> None:
        memory = None
        try:
            with Handshake.ask(link, request) as handshake:
                async with asyncio.timeout(OPEN_S):
                    memory, nonce = await import_it(await handshake.exposed)
                handshake.prove(nonce)
                # From here on the peer may offer what only that memory can show.
                await handshake.wait_accepted(link)
        except BaseException:
            if memory is not None:
                memory.link_over()
            raise
        self._of_links[link] = memory
        link.call_when_lost(lambda _: memory.link_over())

    async def _import_gpu(
        self, own: DeviceAllocation, exposed: Exposed
    ) -> tuple[MappedMemory, bytes]:
        imported, nonce = await import_gpu(exposed, own)
        digest = strictest(self._digest, exposed.digest)
        return ImportedMemory(imported, digest, own), nonce

    async def _import_file(self, exposed: Exposed) -> tuple[MappedMemory, bytes]:
        sock, fd = await fetch_file(exposed.address, exposed.ticket)
        try:
            file = self._file = _open_file(fd, exposed.nbytes, self._file)
        except BaseException:
            sock.close()
            raise
        digest = strictest(self._digest, exposed.digest)
        return MappedMemory(sock, file, digest), file.nonce


def _open_file(fd: int, nbytes: int, known: MappedFile | None) -> MappedFile:
    if known is not None and known.nbytes == nbytes and known.is_same_as(fd):
        os.close(fd)
        return known
    return MappedFile(fd, nbytes)


def check_same_host(link: Link, boot_id: str) -> None:
    """Check that the peer could share memory with this process, which has ``boot_id``.

    :raises ValueError: it is elsewhere
    """
    is_same_boot = bool(boot_id) and link.peer.boot_id == boot_id
    if not is_same_boot or link.own_host != link.peer_host:
        raise ValueError("it is on another host")


class _WhyNot(NamedTuple):
    """Why something was not opened; where no entries are served nothing has to be."""

    text: str
    is_served: bool = True

    def log(self, what: str, link: Link, way: str) -> None:
        level = logging.INFO if self.is_served else logging.DEBUG
        logger.log(level, "%s %s %s: %s", what, link.peer.id, way, self.text)


async def _why_not(link: Link, opening: Coroutine[Any, Any, None]) -> _WhyNot | None:
    """Return why something was not opened; ``None`` if it was.

    :raises PeerLost: the link was lost meanwhile
    """
    try:
        await opening
    except (AsyncKVError, OSError, ValueError, TimeoutError) as exc:
        if isinstance(exc, PeerLost) and not link.is_open:
            raise
        # Its words alone: whoever keeps the error keeps the memory.
        return _WhyNot(str(exc) or "no answer", not isinstance(exc, NotServed))
    return None
