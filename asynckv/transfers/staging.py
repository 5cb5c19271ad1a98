"""Copies of tensors on their way from this side's GPU to a peer's.

They lie on that GPU: NCCL moves these alone, so that nobody has to abort it for the
caller's memory to be left alone, and by CUDA IPC a peer on the same GPU reads these
alone. Room is handed out first come, first served, all that belongs together at once;
it is the asker's until it is released, and then until nothing is at it any more. What
finds no room goes through host memory, and is read on the GPU when it leaves, not
before: so one piece is brought to the host while the last one is on the wire.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from asynckv.abc import InsertWriter
from asynckv.errors import PeerLost
from asynckv.links.answers import Answer
from asynckv.observability.waits import LoggedWait
from asynckv.tensors.blocks import KVBlocks, KVMemory, spec_in
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_regions import DeviceRegion
from asynckv.tensors.device_tensors import gpu_of
from asynckv.tensors.growth import Growth
from asynckv.tensors.on_gpu import KVOnGpu
from asynckv.tensors.paged_arena import PagedArena
from asynckv.tensors.views import empty_tensor
from asynckv.transfers.eager import rides
from asynckv.transfers.host_copies import OnGpu
from asynckv.transfers.manifest import INLINE_NBYTES
from asynckv.transfers.targets import device_memory
from asynckv.types import TensorSpec
from asynckv.waits.line import FairLine

__all__ = (
    "GpuRoom",
    "GpuStaging",
    "Source",
    "SourceOnGpu",
    "StagedTensor",
    "StagingWriter",
    "are_staged",
    "gpu_source",
    "places_of",
    "release_staged",
    "until_made",
)


class StagedTensor:
    """A copy of one tensor, for whoever sends it, until it is released."""

    __slots__ = ("nbytes", "region", "spec")

    def __init__(self, region: DeviceRegion, spec: TensorSpec) -> None:
        self.spec = spec
        self.nbytes = spec.nbytes
        self.region = region

    def place(self) -> DeviceMemory:
        """Return its bytes; whoever has them keeps them.

        :raises RuntimeError: it was released
        """
        return device_memory(self.region, self.spec)

    def release(self) -> None:
        """Let the memory be another's when nothing is at it any more. Never waits."""
        self.region.release()


Source: TypeAlias = KVMemory | StagedTensor | KVOnGpu
"""Where the bytes of what is sent come from."""


class GpuStaging:
    """Makes them in memory of ``growth``, by ``pool``, where that has room now.

    With ``takes_host`` also of what is in host memory. It has no room where it
    ``is_awaited`` by others.
    """

    def __init__(
        self,
        growth: Growth,
        pool: CopyPool,
        *,
        takes_host: bool = False,
        is_awaited: Callable[[], bool] = lambda: False,
    ) -> None:
        self._growth = growth
        self._pool = pool
        self._takes_host = takes_host
        self._is_awaited = is_awaited

    async def staged(self, memory: KVMemory | KVOnGpu) -> StagedTensor | None:
        """Return a copy of what is on this GPU, or may be; ``None`` of anything else,
        or for lack of room.

        A cancelled call has made none, and ends when no GPU reads ``memory``.

        :raises GPUFailed: the GPU failed
        """
        if not self._is_here(memory) or (region := self._take(memory.nbytes)) is None:
            return None
        staged = StagedTensor(region, spec_in(memory))
        try:
            # No variable: an error's traceback would keep the memory in use.
            await self._pool.copy([memory], [staged.place()], digest=False)
        except BaseException:
            staged.release()
            raise
        return staged

    def _is_here(self, memory: KVMemory | KVOnGpu) -> bool:
        pages = self._growth.device_pages
        if pages is None or not pages.is_open:
            return False
        if isinstance(memory, KVOnGpu):
            return memory.memory.device == pages.device.index
        tensor = memory.pool if isinstance(memory, KVBlocks) else memory
        gpu = gpu_of(tensor)
        return gpu == pages.device.index or (gpu is None and self._takes_host)

    def _take(self, nbytes: int) -> DeviceRegion | None:
        arena = self._growth.arena
        if self._is_awaited():
            return None
        region = arena.take_spare(nbytes) if isinstance(arena, PagedArena) else None
        return region if isinstance(region, DeviceRegion) else None


def places_of(sources: Sequence[Source]) -> list[KVMemory | DeviceMemory | KVOnGpu]:
    """Return where the bytes of each lie, for whoever copies or digests them."""
    return [s.place() if isinstance(s, StagedTensor) else s for s in sources]


def are_staged(sources: Sequence[Source]) -> bool:
    """Whether NCCL may send all that does not ride: copies on this side's GPU."""
    large = [source for source in sources if not rides(source.nbytes)]
    return bool(large) and all(isinstance(one, StagedTensor) for one in large)


def release_staged(sources: Sequence[Source]) -> None:
    """Nothing of them is sent any more. Never waits."""
    for source in sources:
        if isinstance(source, StagedTensor):
            source.release()


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
        self._arena = growth.arena
        self._line: FairLine[_Waiting] = FairLine(self._give)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_looking = False
        self._was_too_small = False
        growth.call_when_given_back(self._look_soon)

    def is_awaited(self) -> bool:
        """Whether somebody waits: then nobody else is to take of that memory."""
        return bool(self._line)

    async def take(
        self, specs: Sequence[TensorSpec], lost: set[Answer[list[StagedTensor]]]
    ) -> list[StagedTensor] | None:
        """Return memory for each, waiting for its turn; ``None``: it would never fit.

        Who is in ``lost`` meanwhile can be failed. A cancelled call leaves no trace.
        """
        arena, sizes = self._arena, [spec.nbytes for spec in specs]
        if not isinstance(arena, PagedArena) or not arena.pages.could_ever_fit(sizes):
            self._tell_too_small(sum(sizes))
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
        arena, sizes = self._arena, [spec.nbytes for spec in specs]
        regions = arena.take_spares(sizes) if isinstance(arena, PagedArena) else None
        if regions is None:
            return None
        pairs = zip(regions, specs, strict=True)
        return [StagedTensor(r, s) for r, s in pairs if isinstance(r, DeviceRegion)]

    def _look_soon(self) -> None:
        """Not at once: whoever gives memory back is in the middle of something."""
        loop = self._loop  # it may be that none runs here
        if self._line and not self._is_looking and loop and not loop.is_closed():
            self._is_looking = True
            loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_looking = False
        self._line.advance()

    def _give(self, waiting: _Waiting) -> bool:
        if not waiting.turn.is_in:
            if self._arena.is_closed:
                waiting.turn.fail(PeerLost("the way to the peer was closed"))
            elif (taken := self._taken(waiting.specs)) is not None:
                waiting.taken = taken
                waiting.turn.give(taken)
        return waiting.turn.is_in

    def _tell_too_small(self, nbytes: int) -> None:
        if not self._was_too_small:
            self._was_too_small = True
            arena = self._arena
            there = arena.pages.nbytes if isinstance(arena, PagedArena) else 0
            logger.warning(
                "%d bytes leave through host memory: there are %d of the GPU to send "
                "from",
                *(nbytes, there),
            )


class _Waiting:
    """One place in the line."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = specs
        self.turn: Answer[list[StagedTensor]] = Answer()
        self.taken: Sequence[StagedTensor] = ()


_FIRST_NBYTES: Final = 64


class SourceOnGpu(OnGpu):
    """A source as whoever hoists it sees it."""

    def __init__(self, source: StagedTensor | KVOnGpu) -> None:
        self._source = source

    def place(self, spec: TensorSpec) -> DeviceMemory | KVOnGpu:
        source = self._source
        return source.place() if isinstance(source, StagedTensor) else source


async def gpu_source(
    memory: KVMemory | KVOnGpu, staging: GpuStaging | None, nbytes: int
) -> StagedTensor | KVOnGpu | None:
    """Return what can be read on a GPU when it leaves, of a request of ``nbytes``.

    That is a copy on this side's GPU, if there is ``staging`` with room, or the
    caller's own memory. ``None`` stands for what has to be in the host's: what rides,
    and what is not on a GPU or in blocks there.

    :raises GPUFailed: the GPU failed
    """
    if nbytes <= INLINE_NBYTES or rides(memory.nbytes):
        return None
    staged = None if staging is None else await staging.staged(memory)
    if staged is None and isinstance(memory, KVOnGpu):
        return memory
    return staged


async def until_made(sources: Sequence[Source], pool: CopyPool) -> None:
    """Wait until the caller's stream has made what is read where it lies.

    A peer that has granted memory gives up whoever sends nothing for long. A cancelled
    call ends when no GPU is read.

    :raises GPUUnavailable: CuPy, a driver or a GPU is missing
    :raises GPUFailed: the GPU failed
    """
    made = [source for source in sources if isinstance(source, KVOnGpu)]
    if not made:
        return
    firsts = [one.part(0, min(one.nbytes, _FIRST_NBYTES)) for one in made]
    targets = [empty_tensor(one.spec) for one in firsts]
    copying = pool.copy(firsts, targets, digest=False)
    del sources, made, firsts  # an error's traceback would keep the memory in use
    await copying
