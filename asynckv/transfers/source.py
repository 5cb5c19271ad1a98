"""Where the bytes of one tensor of a transfer come from.

From memory of the host, from the caller's memory on a GPU, or from a region of an
arena, be that of the host or of a GPU. Whoever sends them asks the source, and nobody
else needs to know of what kind it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

import torch

from asynckv.devices.arena import DeviceRegion, place_of
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.growth import Growth
from asynckv.devices.tensors import KVOnGpu, gpu_of
from asynckv.protocol.transfer import EAGER_NBYTES
from asynckv.protocol.wire import digest_of
from asynckv.tensors.arena import Region
from asynckv.tensors.blocks import KVBlocks, KVMemory, rows_of, spec_in
from asynckv.tensors.runs import Memory, Runs
from asynckv.tensors.views import empty_tensor, memory_of, packed, tensor_over
from asynckv.transfers.manifest import INLINE_NBYTES
from asynckv.transfers.targets import device_memory
from asynckv.types import TensorSpec

__all__ = (
    "CopiedSource",
    "GpuSource",
    "GpuStaging",
    "HostSource",
    "Place",
    "RegionSource",
    "Source",
    "StagedTensor",
    "are_on_gpu",
    "copied_sources",
    "dense",
    "readable_in_place",
    "release_staged",
    "source_of",
    "until_made",
)

Place: TypeAlias = torch.Tensor | KVBlocks | Runs | DeviceMemory | KVOnGpu
"""What is copied from, or digested."""


class Source(Protocol):
    """The bytes of one tensor. ``digest`` is theirs, and empty while it is unknown."""

    digest: bytes

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype."""

    @property
    def nbytes(self) -> int:
        """How many they are."""

    @property
    def is_on_gpu(self) -> bool:
        """Whether they are on a GPU: then they have no :meth:`host`."""

    @property
    def region(self) -> Region | None:
        """Memory of an arena that they are in, if they are: peers may read it."""

    def host(self) -> Memory:
        """Return where they lie in memory of the host."""

    def place(self) -> Place:
        """Return where they lie, for whoever copies or digests them."""


class HostSource:
    """Memory of the host: a dense tensor, or blocks.

    It is the caller's, or a view of all of a ``region``, which lives as long as that.
    """

    __slots__ = ("_memory", "digest", "nbytes", "region")

    is_on_gpu: Final = False

    def __init__(
        self, memory: KVMemory, digest: bytes = b"", region: Region | None = None
    ) -> None:
        self.digest = digest
        self.nbytes = memory.nbytes
        self.region = region
        self._memory = memory

    @property
    def spec(self) -> TensorSpec:
        return spec_in(self._memory)

    def host(self) -> Memory:
        return memory_of(self._memory)

    def place(self) -> KVMemory:
        return self._memory


class CopiedSource:
    """A copy of few bytes, made when they were looked at; with their digest."""

    __slots__ = ("_copy", "digest", "nbytes", "spec")

    is_on_gpu: Final = False
    region: Final = None

    def __init__(self, spec: TensorSpec, copy: bytes) -> None:
        self.digest = digest_of(copy)
        self.spec = spec
        self.nbytes = len(copy)
        self._copy = copy

    def host(self) -> Memory:
        return memoryview(self._copy)

    def place(self) -> torch.Tensor:
        return tensor_over(self._copy, self.spec)


class GpuSource:
    """The caller's memory of a GPU. It is read when it leaves, through the host."""

    __slots__ = ("_memory", "digest")

    is_on_gpu: Final = True
    region: Final = None

    def __init__(self, memory: KVOnGpu) -> None:
        self.digest = b""
        self._memory = memory

    @property
    def spec(self) -> TensorSpec:
        return self._memory.spec

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def host(self) -> Memory:
        raise TypeError("the memory of a GPU has no view for this process")

    def place(self) -> KVOnGpu:
        return self._memory


class RegionSource:
    """Memory of an arena. Whoever sends it keeps it from being released."""

    __slots__ = ("digest", "is_on_gpu", "nbytes", "region", "spec")

    def __init__(self, region: Region, spec: TensorSpec, digest: bytes = b"") -> None:
        self.digest = digest
        self.nbytes = region.nbytes
        self.is_on_gpu = region.is_on_device
        self.region = region
        self.spec = spec

    def host(self) -> Memory:
        return self.region.memory()

    def place(self) -> Place:
        return place_of(self.region, self.spec)


class StagedTensor(RegionSource):
    """A copy of one tensor on this side's GPU, until it is released."""

    __slots__ = ()

    region: DeviceRegion

    def place(self) -> DeviceMemory:
        return device_memory(self.region, self.spec)

    def release(self) -> None:
        """Let the memory be another's when nothing is at it any more. Never waits."""
        self.region.release()


def release_staged(sources: Sequence[Source]) -> None:
    """Nothing of them is sent any more: no copy of this side's own is needed.

    Never waits.
    """
    for source in sources:
        if isinstance(source, StagedTensor):
            source.release()


def are_on_gpu(sizes: Sequence[int], regions: Sequence[Region | None]) -> bool:
    """Whether NCCL may send all that is not eager, of parts of so many bytes each."""
    is_any = False
    for nbytes, region in zip(sizes, regions, strict=False):
        if nbytes > EAGER_NBYTES:
            if region is None or not region.is_on_device:
                return False
            is_any = True
    return is_any


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

    async def staged(
        self, memory: KVMemory | KVOnGpu, *, digest: bool = False
    ) -> StagedTensor | None:
        """Return a copy of what is on this GPU, or may be; ``None`` of anything else,
        or for lack of room.

        With its digest, if that is wanted. A cancelled call has made none, and ends
        when no GPU reads ``memory``.

        :raises GPUFailed: the GPU failed
        """
        if not self._is_here(memory) or (region := self._take(memory.nbytes)) is None:
            return None
        staged = StagedTensor(region, spec_in(memory))
        try:
            # No variable: an error's traceback would keep the memory in use.
            (staged.digest,) = await self._pool.copy(
                [memory], [staged.place()], digest=digest
            )
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
        if self._is_awaited():
            return None
        regions = self._growth.take_on_device([nbytes])
        return None if regions is None else regions[0]


def copied_sources(
    tensors: Mapping[str, KVMemory], max_nbytes: int
) -> dict[str, Source] | None:
    """Return copies of all, if they are plain tensors of no more bytes together."""
    sources: dict[str, Source] = {}
    for name, tensor in tensors.items():
        small = packed(tensor, max_nbytes) if type(tensor) is torch.Tensor else None
        if small is None:
            return None
        sources[name] = CopiedSource(*small)
        max_nbytes -= len(small[1])
    return sources


async def source_of(
    memory: KVMemory | KVOnGpu,
    pool: CopyPool,
    staging: GpuStaging | None,
    nbytes: int,
) -> Source:
    """Return what can be sent as it lies, of a request of ``nbytes``.

    What is long, and on a GPU, is read there when it leaves: in a copy, if there is
    ``staging`` with room, or in the caller's own memory. Of anything else it is what
    lanes can read in memory of the host.

    :raises GPUFailed: the GPU failed
    """
    if nbytes > INLINE_NBYTES and memory.nbytes > EAGER_NBYTES:
        staged = None if staging is None else await staging.staged(memory)
        if staged is not None:
            return staged
        if isinstance(memory, KVOnGpu):
            return GpuSource(memory)
    return HostSource(await readable_in_place(memory, pool))


async def readable_in_place(memory: KVMemory | KVOnGpu, pool: CopyPool) -> KVMemory:
    """Return what lanes can read as it lies: ``memory`` itself, if it is blocks or
    dense, or a tensor of contiguous rows; else a copy.
    """
    if isinstance(memory, KVBlocks):
        is_on_gpu = gpu_of(memory.pool) is not None
        return await _copy_of(memory, pool) if is_on_gpu else memory
    if isinstance(memory, KVOnGpu) or memory.is_cuda:
        return await dense(memory, pool)
    return rows_of(memory) or await dense(memory, pool)


async def dense(tensor: torch.Tensor | KVOnGpu, pool: CopyPool) -> torch.Tensor:
    """Return ``tensor`` if its memory is its elements in order, else a copy.

    Of what is on a GPU it is a copy in host memory.
    """
    if isinstance(tensor, KVOnGpu) or tensor.is_cuda:
        return await _copy_of(tensor, pool)
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor.detach()
    return await _copy_of(tensor, pool)


async def _copy_of(memory: KVMemory | KVOnGpu, pool: CopyPool) -> torch.Tensor:
    copy = pool.host_empty(spec_in(memory))
    await pool.copy([memory], [copy], digest=False)
    return copy


_FIRST_NBYTES: Final = 64


async def until_made(sources: Sequence[Source], pool: CopyPool) -> None:
    """Wait until the caller's stream has made what is read where it lies.

    A peer that has granted memory gives up whoever sends nothing for long. A cancelled
    call ends when no GPU is read.

    :raises GPUUnavailable: CuPy, a driver or a GPU is missing
    :raises GPUFailed: the GPU failed
    """
    made = [source.place() for source in sources if isinstance(source, GpuSource)]
    if not made:
        return
    firsts = [one.part(0, min(one.nbytes, _FIRST_NBYTES)) for one in made]
    targets = [empty_tensor(one.spec) for one in firsts]
    copying = pool.copy(firsts, targets, digest=False)
    del sources, made, firsts  # an error's traceback would keep the memory in use
    await copying
