"""By what payload goes to a peer of buffers, and comes from it: the asker's table.

It leaves by the link; from memory of this side's GPU also by NCCL, or a peer of this
host reads it there. It comes by the link, or is read where the peer shows it; to memory
of this side's GPU also by NCCL.

What leaves a GPU is copied first, to memory of that GPU: nobody has to abort NCCL then
for the caller's memory to be left alone, and a peer on the same GPU reads the copies
alone. Room for them is handed out first come, first served, all that belongs together
at once; it is the asker's until it is released, and then until nothing is at it any
more. What finds no room goes through host memory, and is read on the GPU when it
leaves, not before: so one piece is brought to the host while the last one is on the
wire.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Sequence
from functools import cached_property

from asynckv.abc import InsertWriter
from asynckv.devices.copying import CopyPool
from asynckv.devices.growth import Growth
from asynckv.errors import PeerLost
from asynckv.links.link import Link
from asynckv.observability.waits import LoggedWait
from asynckv.sharing.gpu_channel import GpuLink, NcclRoute
from asynckv.sharing.imports import ImportedMemory
from asynckv.sharing.mappings import MappedMemory
from asynckv.sharing.peer_imports import PeerImports
from asynckv.transfers.delivery import ReceiveBudget
from asynckv.transfers.host_copies import D2HCopier, HostCopies
from asynckv.transfers.manifest import INLINE_NBYTES
from asynckv.transfers.outgoing import GpuImporter
from asynckv.transfers.readers import IpcReader, MapReader
from asynckv.transfers.source import GpuStaging, StagedTensor, release_staged
from asynckv.types import TensorSpec
from asynckv.waits.waiting import FairQueue, Reply

__all__ = (
    "GpuRoom",
    "GpuRoutes",
    "PeerRoutes",
    "StagingWriter",
)

logger = logging.getLogger(__name__)


class StagingWriter(InsertWriter):
    """A writer from memory of this side's GPU, where something leads on from there."""

    @abc.abstractmethod
    async def room(self, specs: Sequence[TensorSpec]) -> list[StagedTensor] | None:
        """Take memory for tensors that are made there, and put by :meth:`put_staged`.

        ``None``: nothing leads from there to the buffer's GPU now, they are too small
        for that, or they would never fit. Waits, first come, first served, until
        others have left. Who gets memory releases it. A cancelled call has taken none.

        :raises EntryAborted: the entry is gone already
        :raises PeerLost: the peer is gone
        """

    @abc.abstractmethod
    async def put_staged(self, name: str, staged: StagedTensor) -> None:
        """As :meth:`put`, of what was made in its memory and is ready.

        On return, however it ends, it may be released: the peer, or the GPU, keeps
        what it is still at.
        """


class GpuRoom:
    """Hands out memory of ``growth``, which is open, in the order of those who ask."""

    def __init__(self, growth: Growth) -> None:
        self._growth = growth
        self._line: FairQueue[_Waiting] = FairQueue(self._give)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_looking = False
        self._was_too_small = False
        growth.call_when_given_back(self._recheck_soon)

    def is_awaited(self) -> bool:
        """Whether somebody waits: then nobody else is to take of that memory."""
        return bool(self._line)

    async def take(
        self, specs: Sequence[TensorSpec], lost: set[Reply[list[StagedTensor]]]
    ) -> list[StagedTensor] | None:
        """Return memory for each, waiting for its turn; ``None``: it would never fit.

        Who is in ``lost`` meanwhile can be failed. A cancelled call leaves no trace.
        """
        pages, sizes = self._growth.device_pages, [spec.nbytes for spec in specs]
        if pages is None or not pages.could_ever_fit(sizes):
            there = 0 if pages is None else pages.nbytes
            self._warn_too_small(sum(sizes), there)
            return None
        waiting = _Waiting(tuple(specs))
        self._loop = asyncio.get_running_loop()
        lost.add(waiting.turn)
        try:
            if self._line.join(waiting):
                return await waiting.turn
            who = f"what leaves a GPU ({sum(sizes)} bytes)"
            with LoggedWait(who, "room to be sent from", "the end of what left before"):
                return await waiting.turn
        except BaseException:
            release_staged(waiting.taken)  # it was given in the same tick
            raise
        finally:
            lost.discard(waiting.turn)
            self._line.quit(waiting)

    def _taken(self, specs: Sequence[TensorSpec]) -> list[StagedTensor] | None:
        regions = self._growth.take_on_device([spec.nbytes for spec in specs])
        if regions is None:
            return None
        return [StagedTensor(r, s) for r, s in zip(regions, specs, strict=True)]

    def _recheck_soon(self) -> None:
        """Not at once: whoever gives memory back is in the middle of something."""
        loop = self._loop  # it may be that none runs here
        if self._line and not self._is_looking and loop and not loop.is_closed():
            self._is_looking = True
            loop.call_soon(self._recheck)

    def _recheck(self) -> None:
        self._is_looking = False
        self._line.advance()

    def _give(self, waiting: _Waiting) -> bool:
        if not waiting.turn.is_in:
            if self._growth.arena.is_closed:
                waiting.turn.fail(PeerLost("the way to the peer was closed"))
            elif (taken := self._taken(waiting.specs)) is not None:
                waiting.taken = taken
                waiting.turn.give(taken)
        return waiting.turn.is_in

    def _warn_too_small(self, nbytes: int, there: int) -> None:
        if not self._was_too_small:
            self._was_too_small = True
            logger.warning(
                "%d bytes leave through host memory: there are %d of the GPU to send "
                "from",
                *(nbytes, there),
            )


class _Waiting:
    """One place in the line."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = specs
        self.turn: Reply[list[StagedTensor]] = Reply()
        self.taken: Sequence[StagedTensor] = ()


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
        super().__init__(imports, budget, on_gpu.make_pool())
        self.room = self._room = GpuRoom(on_gpu)
        self._on_gpu = on_gpu

    def device_route(self, link: Link) -> NcclRoute | None:
        way = self.nccl(link)
        return None if way is None else NcclRoute(way, self.pool)

    def importer(self, link: Link) -> GpuImporter | None:
        importer = self._imports.importer(link)
        return None if importer is None else GpuImporter(importer, self.pool)

    def staging(self, link: Link | None, nbytes: int) -> GpuStaging | None:
        if nbytes <= INLINE_NBYTES or link is None:
            return None
        is_read = self._imports.importer(link) is not None
        if not is_read and self.nccl(link) is None:
            return None
        return GpuStaging(
            *(self._on_gpu, self.pool),
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
            return IpcReader(memory, self.pool, views=views)
        return MapReader(memory, self.pool, views=views, is_for_gpu=True)
