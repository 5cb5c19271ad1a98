"""By what payload goes to a peer of buffers, and comes from it: the asker's table.

It leaves by the link; from memory of this side's GPU also by NCCL, or a peer of this
host reads it there. It comes by the link, or is read where the peer shows it; to memory
of this side's GPU also by NCCL. Nothing here waits.
"""

from __future__ import annotations

from functools import cached_property

from asynckv.devices.copying import CopyPool
from asynckv.devices.growth import Growth
from asynckv.links.link import Link
from asynckv.sharing.gpu_channel import GpuLink, NcclRoute
from asynckv.sharing.imports import ImportedMemory
from asynckv.sharing.mappings import MappedMemory
from asynckv.sharing.peer_imports import PeerImports
from asynckv.transfers.delivery import ReceiveBudget
from asynckv.transfers.gpu_room import GpuRoom
from asynckv.transfers.host_copies import D2HCopier, HostCopies
from asynckv.transfers.manifest import INLINE_NBYTES
from asynckv.transfers.outgoing import GpuImporter
from asynckv.transfers.readers import IpcReader, MapReader
from asynckv.transfers.source import GpuStaging

__all__ = ("GpuRoutes", "PeerRoutes")


class PeerRoutes:
    """Those of a side that receives in memory of its host: in ``budget``, by ``pool``.

    ``imports`` know what the links of the peer show.
    """

    def __init__(
        self, imports: PeerImports, budget: ReceiveBudget, pool: CopyPool
    ) -> None:
        self.budget = budget
        self.pool = pool
        self.room: GpuRoom | None = None
        """Where layers are made on the GPU that leave from there, if it has memory."""
        self._imports = imports
        self._readers: dict[bool, MapReader] = {}

    @cached_property
    def copies(self) -> HostCopies:
        """Memory of the host for what is sent from a GPU through it."""
        return HostCopies()

    def reader(self, link: Link, *, views: bool) -> MapReader | None:
        """Return what reads the memory that ``link`` shows, if it does."""
        if (memory := self._imports.of(link)) is None:
            return None
        reader = self._readers.get(views)
        if reader is None or reader.memory is not memory:
            reader = self._readers[views] = self._new_reader(memory, views=views)
        return reader

    def d2h(self, link: Link) -> D2HCopier:
        """Return what brings what is on a GPU to the host, for the link's payload."""
        return D2HCopier(self.pool, self.copies, link.payload.feeds)

    def nccl(self, link: Link) -> GpuLink | None:
        """Return what moves payload between the peer's GPU and this one, if it does."""
        return self._imports.way(link)

    def device_route(self, link: Link) -> NcclRoute | None:
        """Return by what a delivery may come from the peer's GPU, if it may."""
        return None

    def importer(self, link: Link) -> GpuImporter | None:
        """Return who reads what is put there in memory of the GPU, if somebody does."""
        return None

    def staging(self, link: Link | None, nbytes: int) -> GpuStaging | None:
        """Return where copies are made of so much for the peer's GPU, if it may go."""
        return None

    def sends_from(self, link: Link | None) -> str:
        """Return from which GPU what is put goes to the peer's now, else ``"cpu"``."""
        return "cpu"

    def reads_gpu(self, link: Link | None) -> bool:
        """Are entries read in the peer's memory of this side's own GPU now?"""
        return False

    def close(self) -> None:
        """Read nothing more, and use no memory."""
        self._readers.clear()

    async def aclose(self) -> None:
        """As :meth:`close`, and wait until nothing is at the memory."""
        self.close()

    def _new_reader(self, memory: MappedMemory, *, views: bool) -> MapReader:
        return MapReader(memory, self.pool, views=views)


class GpuRoutes(PeerRoutes):
    """Those of a side that receives in memory of its GPU, and sends from there.

    That is ``on_gpu``, which is closed with it.
    """

    def __init__(
        self, imports: PeerImports, budget: ReceiveBudget, on_gpu: Growth
    ) -> None:
        self._device_pool = on_gpu.make_pool()
        super().__init__(imports, budget, self._device_pool)
        self.room = self._room = GpuRoom(on_gpu)
        self._on_gpu = on_gpu

    def device_route(self, link: Link) -> NcclRoute | None:
        way = self.nccl(link)
        return None if way is None else NcclRoute(way, self._device_pool)

    def importer(self, link: Link) -> GpuImporter | None:
        importer = self._imports.importer(link)
        return None if importer is None else GpuImporter(importer, self._device_pool)

    def staging(self, link: Link | None, nbytes: int) -> GpuStaging | None:
        if nbytes <= INLINE_NBYTES or link is None:
            return None
        is_read = self._imports.importer(link) is not None
        if not is_read and self.nccl(link) is None:
            return None
        return GpuStaging(
            *(self._on_gpu, self._device_pool),
            takes_host=is_read,
            is_awaited=self._room.is_awaited,
        )

    def sends_from(self, link: Link | None) -> str:
        pages = self._on_gpu.device_pages
        if pages is None or self.staging(link, INLINE_NBYTES + 1) is None:
            return "cpu"
        return pages.device.name

    def reads_gpu(self, link: Link | None) -> bool:
        memory = None if link is None else self._imports.of(link)
        is_there = link is not None and link.is_open
        return (
            is_there and isinstance(memory, ImportedMemory) and memory.imported.is_near
        )

    def close(self) -> None:
        super().close()
        self._on_gpu.close()

    async def aclose(self) -> None:
        await self._on_gpu.aclose()

    def _new_reader(self, memory: MappedMemory, *, views: bool) -> MapReader:
        if isinstance(memory, ImportedMemory):
            return IpcReader(memory, self._device_pool, views=views)
        return MapReader(memory, self.pool, views=views, is_for_gpu=True)
