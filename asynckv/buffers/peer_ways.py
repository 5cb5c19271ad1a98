"""What payload of one peer comes by, and goes by: its memory, and ways between GPUs."""

from __future__ import annotations

from functools import cached_property, partial

from asynckv.buffers.gpu_room import GpuRoom
from asynckv.buffers.gpu_staging import GpuStaging
from asynckv.buffers.host_copies import HostCopies
from asynckv.buffers.importing import GpuImports, ImportedMemory
from asynckv.buffers.ipc_reader import IpcReader
from asynckv.buffers.manifest import INLINE_NBYTES
from asynckv.buffers.map_reader import MapReader
from asynckv.buffers.mapped import MappedMemory, Mappings
from asynckv.buffers.receive_budget import ReceiveBudget
from asynckv.buffers.reconnecting import ReconnectingLink
from asynckv.buffers.shown_parts import ShownTo
from asynckv.links.gpu_arrivals import GpuArrivals
from asynckv.links.gpu_link import GpuLink
from asynckv.links.link import Link
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.growth import Growth

__all__ = ("PeerWays",)


class PeerWays:
    """What ``mappings`` have opened on the links of one peer. Nothing here waits.

    What is received lands in memory of ``budget``, or ``on_gpu``, by ``pool``.
    """

    def __init__(
        self,
        links: ReconnectingLink,
        mappings: Mappings | GpuImports,
        budget: ReceiveBudget,
        pool: CopyPool,
        on_gpu: Growth | None,
    ) -> None:
        self.pool = pool
        self._links = links
        self._mappings = mappings
        self._budget = budget
        self._on_gpu = on_gpu
        self._readers: dict[str, MapReader] = {}

    @cached_property
    def copies(self) -> HostCopies:
        """Memory of the host for what is sent from a GPU through it."""
        return HostCopies()

    @cached_property
    def room(self) -> GpuRoom | None:
        """Where layers are made on the GPU that leave from there, if it has memory."""
        return None if self._on_gpu is None else GpuRoom(self._on_gpu)

    @property
    def lead_to_gpu(self) -> bool:
        """Would what is put into the lookup buffer go there from GPU to GPU now?"""
        return self.staging(INLINE_NBYTES + 1) is not None

    @property
    def read_gpu_memory(self) -> bool:
        """Are entries read in the peer's memory of this side's own GPU now?"""
        link = self._links.current
        return (
            link is not None
            and link.is_open
            and isinstance(self._mappings.of(link), ImportedMemory)
        )

    def reader(self, link: Link, *, views: bool) -> MapReader | None:
        """Return what reads the memory that ``link`` shows, if it does."""
        if (memory := self._mappings.of(link)) is None:
            return None
        return self._reader("views" if views else "copies", memory, views=views)

    def way(self, link: Link) -> GpuLink | None:
        """Return what moves payload between the peer's GPU and this one, if it does."""
        ways = self._mappings
        return ways.way(link) if isinstance(ways, GpuImports) else None

    def arrivals(self, link: Link) -> GpuArrivals | None:
        """Return by what a delivery may come from the peer's GPU, if it may."""
        way = self.way(link)
        if way is None or not isinstance(self.pool, DeviceCopyPool):
            return None
        return GpuArrivals(way, self.pool)

    def shown(self, link: Link) -> ShownTo | None:
        """Return who reads what is put there in memory of the GPU, if somebody does."""
        ways, pool = self._mappings, self.pool
        if not isinstance(ways, GpuImports) or not isinstance(pool, DeviceCopyPool):
            return None
        holder = ways.holder(link)
        return None if holder is None else ShownTo(holder, pool)

    def staging(self, nbytes: int) -> GpuStaging | None:
        """Return where copies are made of so much for the peer's GPU, if it may go."""
        link, ways, memory = self._links.current, self._mappings, self._on_gpu
        room = self.room
        if nbytes <= INLINE_NBYTES or link is None or memory is None or room is None:
            return None
        make = partial(GpuStaging, memory, self.pool, is_awaited=room.is_awaited)
        if isinstance(ways, GpuImports) and ways.holder(link) is not None:
            return make(takes_host=True)
        return None if self.way(link) is None else make()

    def close(self) -> None:
        """Read nothing more."""
        self._readers.clear()

    def _reader(self, name: str, memory: MappedMemory, *, views: bool) -> MapReader:
        reader = self._readers.get(name)
        if reader is None or reader.memory is not memory:
            reader = self._readers[name] = self._new_reader(memory, views=views)
        return reader

    def _new_reader(self, memory: MappedMemory, *, views: bool) -> MapReader:
        if isinstance(memory, ImportedMemory) and isinstance(self.pool, DeviceCopyPool):
            return IpcReader(memory, self.pool, views=views)
        is_on_gpu = self._on_gpu is not None
        return MapReader(memory, self.pool, views=views, is_for_gpu=is_on_gpu)
