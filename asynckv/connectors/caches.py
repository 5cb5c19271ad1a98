"""The paged caches of one rank: pools of blocks by layer, read and written in place.

From their blocks bytes go to memory of the host or their GPU, and back, wherever the
caches are. On a GPU what is read is what the engine's stream had been given to compute,
and nothing is written that it may still read.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from asynckv.abc import BlockIds
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory, Event
from asynckv.devices.marks import StreamMarks
from asynckv.devices.pools import GpuPools, gpu_mark
from asynckv.devices.tensors import at_once, gpu_of
from asynckv.errors import GPUFailed, GPUUnavailable
from asynckv.parallel.copies import region_block_nbytes
from asynckv.parallel.shapes import EngineShape
from asynckv.tensors.blocks import KVBlocks, landing_of
from asynckv.tensors.views import empty_tensor, spec_of
from asynckv.types import TensorSpec

__all__ = (
    "REGION_NAMES",
    "BlockMoves",
    "PagedCaches",
    "StagedCopy",
    "Staging",
)


REGION_NAMES = ("key", "value")
"""What the pools of a layer are called in an entry; a fused one is all ``key``."""


class PagedCaches:
    """Layers in the order of the model, and each one's pools: blocks come first.

    With a layout that splits keys from values a layer's tensor holds two pools,
    otherwise it is one. All are in host memory, or on one GPU. ``groups`` says which
    of a request's lists of blocks is whose.

    :raises ValueError: they are no such caches, or have no plain contiguous blocks, or
        these have not the bytes that ``shape`` says
    """

    def __init__(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        shape: EngineShape | None,
        groups: Mapping[str, int] | None = None,
    ) -> None:
        if not kv_caches:
            raise ValueError("there is no cache to register")
        self._pools = {
            layer: _pools_of(layer, cache, shape) for layer, cache in kv_caches.items()
        }
        self._groups = dict(groups or {})
        self.layers = tuple(self._pools)
        devices = {pool.device for pools in self._pools.values() for pool in pools}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"the caches of one rank are on several devices: {names}")
        (self.device,) = devices

    @classmethod
    def across_layers(
        cls,
        kv_cache: torch.Tensor,
        layer_names: Sequence[str],
        shape: EngineShape | None,
    ) -> PagedCaches:
        """Take one tensor for all layers, layers first, or blocks first by layout.

        :raises ValueError: there are not as many layers as names
        """
        if shape is not None and shape.layout.is_across_layers:
            return cls({"layers": kv_cache}, shape)
        if len(kv_cache) != len(layer_names):
            raise ValueError(
                f"the tensor has {len(kv_cache)} layers, {len(layer_names)} have names"
            )
        layers = dict(zip(layer_names, kv_cache, strict=True))
        return cls(layers, shape)

    @property
    def is_on_gpu(self) -> bool:
        """Whether they are on a GPU; else they are in host memory."""
        return self.device.type == "cuda"

    def group_of(self, layer: str) -> int:
        """Return which of a request's lists of blocks is the layer's."""
        return self._groups.get(layer, 0)

    def pools(self, layer: str) -> tuple[torch.Tensor, ...]:
        """Return the pools of a layer, keys first."""
        return self._pools[layer]

    def blocks(self, layer: str, block_ids: BlockIds) -> dict[str, KVBlocks]:
        """Return a request's blocks of one layer, by their names in an entry.

        :raises IndexError: there is no block of such an id, or no such group
        """
        ids = block_ids[self.group_of(layer)]
        return {
            f"{layer}.{name}": KVBlocks(pool, ids)
            for name, pool in zip(REGION_NAMES, self._pools[layer], strict=False)
        }

    def specs(self, block_ids: BlockIds) -> dict[str, TensorSpec]:
        """Return what an entry of these blocks holds."""
        return {
            name: blocks.spec
            for layer in self.layers
            for name, blocks in self.blocks(layer, block_ids).items()
        }


def _pools_of(
    layer: str, cache: torch.Tensor, shape: EngineShape | None
) -> tuple[torch.Tensor, ...]:
    if cache.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{layer} is on {cache.device}, not a GPU and not the host's")
    is_split = shape is not None and shape.layout.split_k_and_v
    if is_split and (not cache.dim() or len(cache) != 2):
        raise ValueError(f"{layer}: keys first, then values, is not {cache.shape}")
    pools = (cache[0], cache[1]) if is_split else (cache,)
    try:
        found = tuple(KVBlocks(pool, ()).block_nbytes for pool in pools)
    except ValueError as exc:
        raise ValueError(f"{layer}: {exc}") from exc
    if shape is not None:  # a plan cuts blocks by it, whatever they are
        counts = shape.stages if shape.layout.is_across_layers else (1,)
        said = [region_block_nbytes(shape, count) for count in counts]
        if found not in said:
            raise ValueError(
                f"{layer} has blocks of {found} bytes, and by the engine's shape they "
                f"are of {said[0]}"
            )
    return pools


_NOT_FOLLOWED: Final = object()


class BlockMoves:
    """Gathers and scatters blocks of one rank's caches, in the threads of ``pool``.

    :raises ValueError: caches on several devices
    """

    def __init__(self, caches: PagedCaches, pool: CopyPool) -> None:
        self.caches = caches
        self.pool = pool
        self._marks = StreamMarks()
        self._followed: object = _NOT_FOLLOWED
        self._pools = [one for layer in caches.layers for one in caches.pools(layer)]
        self._gpu = GpuPools(self._pools, pool.lanes) if caches.is_on_gpu else None
        self._is_open = False

    def close(self) -> None:
        """Let the thread that looks at streams end; the pool is its owner's."""
        self._marks.close()

    @property
    def is_on_gpu(self) -> bool:
        """Whether the host can only read blocks by way of copies."""
        return self._gpu is not None

    def fit(self, device: str) -> bool:
        """Whether blocks go to a buffer on ``device`` without leaving their GPU."""
        return (
            self._gpu is not None
            and str(self.caches.device) == device
            and all(pool.is_contiguous() for pool in self._pools)
        )

    def mark(self) -> Event | None:
        """Mark where the calling thread's current stream is; ``None`` for the host's.

        In any thread. Never waits.

        :raises GPUFailed: CUDA refused
        """
        if self._gpu is None:
            return None
        return gpu_mark(self._pools[0], self.pool.lanes.tensors)

    def follow(self, mark: object) -> None:
        """Let :meth:`now` be ``mark``, which another thread made of its stream.

        Or raise it: an error that the other thread had instead.
        """
        self._followed = mark

    def now(self) -> Event | None:
        """Return the mark that was followed last, else one of this thread's stream.

        :raises GPUFailed: CUDA refused
        """
        if self._followed is _NOT_FOLLOWED:
            return self.mark()
        if isinstance(self._followed, Exception):
            raise self._followed.with_traceback(None)
        return self._followed  # type: ignore[return-value]

    async def reached(self, mark: Event | None) -> None:
        """Wait until the stream of ``mark`` has got there. Cancelled: no trace.

        :raises GPUFailed: it failed, or does not get there
        """
        await self._marks.reached(mark)

    async def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return them in host memory: those of a GPU, which are ready, as copies.

        A cancelled call ends when they are read no more.

        :raises GPUFailed: CUDA failed
        """
        if self._gpu is None:  # then none of them is on one
            return list(tensors)
        found = {at: one for at, one in enumerate(tensors) if gpu_of(one) is not None}
        copies = [empty_tensor(spec_of(one)) for one in found.values()]
        sources = [at_once(one, self.pool.lanes.tensors) for one in found.values()]
        await self.pool.copy(sources, copies, digest=False)
        copied = dict(zip(found, copies, strict=True))
        return [copied.get(at, one) for at, one in enumerate(tensors)]

    async def open(self) -> None:
        """Have ready what a GPU takes its time for: kernels of torch, memory for them.

        CUDA may keep who allocates waiting for an operation that waits for a peer. A
        cancelled call leaves it to the first gathering.

        :raises GPUFailed: CUDA failed
        :raises GPUUnavailable: CuPy or a driver is missing
        """
        if self._gpu is not None and len(self._pools[0]):
            block = KVBlocks(self._pools[0], (0, 0))  # two: one is not gathered
            await self.gather([block], [empty_tensor(block.spec)], None)
        self._is_open = True

    async def open_if_possible(self) -> None:
        """As :meth:`open`, once; what fails is for a transfer to say.

        A cancelled call leaves it to the next one.
        """
        if not self._is_open:
            with contextlib.suppress(GPUFailed, GPUUnavailable):
                await self.open()

    async def gather(
        self,
        sources: Sequence[KVBlocks],
        targets: Sequence[torch.Tensor],
        mark: Event | None,
    ) -> None:
        """Copy blocks into tensors of the host, as they are at ``mark``.

        A cancelled call, or one that fails, ends when no block is read any more.

        :raises GPUFailed: CUDA failed, or the stream of ``mark`` does not get there
        :raises GPUUnavailable: CuPy or a driver is missing
        """
        if self._gpu is None:
            await self.pool.copy(sources, targets, digest=False)
            return
        await self.reached(mark)
        make = functools.partial(self._gpu.gathering, sources, targets)
        await self.pool.make_and_run(make)

    async def gather_there(
        self,
        sources: Sequence[KVBlocks],
        targets: Sequence[DeviceMemory],
    ) -> None:
        """Copy blocks, as they are now, into plain memory of their GPU, that is ready.

        It is there on return. A cancelled call, or one that fails, ends when no block
        is read any more.

        :raises ValueError: a target is on another GPU, or not as long as its blocks
        :raises GPUFailed: CUDA failed
        :raises GPUUnavailable: CuPy or a driver is missing
        """
        if self._gpu is None:
            raise ValueError("these blocks are on no GPU")
        make = functools.partial(self._gpu.gathering, sources, targets)
        await self.pool.make_and_run(make)

    async def scatter(
        self,
        sources: Sequence[torch.Tensor],
        targets: Sequence[KVBlocks],
        mark: Event | None,
    ) -> None:
        """Copy tensors into blocks, after all that was before ``mark``.

        They are the host's, or on the GPU of the blocks, and ready there.
        It is there on return: no stream need wait for it. A cancelled call, or one that
        fails, ends when no block is written any more; they may hold a part then.

        :raises ValueError: a source is not as its blocks are, or a block is there twice
        :raises GPUFailed: as :meth:`gather` does
        :raises GPUUnavailable: as :meth:`gather` does
        """
        if self._gpu is None:
            apart = [landing_of(blocks) for blocks in targets]
            await self.pool.copy(sources, apart, digest=False)
            return
        await self.reached(mark)
        make = functools.partial(self._gpu.scattering, sources, targets)
        await self.pool.make_and_run(make)


class Staging:
    """Copies of blocks: at most ``max_bytes`` at once, counted until they are dropped
    (large ones are freed in a thread, a moment later).

    ``copies`` is how many were made.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.copies = 0
        self.more_room = asyncio.Event()
        """Set when something is dropped the next time."""

    async def copy(
        self,
        blocks: Mapping[str, Mapping[str, KVBlocks]],
        moves: BlockMoves,
        mark: Event | None = None,
    ) -> StagedCopy | None:
        """Copy the tensors of some layers as at ``mark``; ``None``: no room for all.

        It waits for memory alone. A cancelled call leaves no trace, and reads no block.
        """
        sources = {
            (layer, n): one for layer in blocks for n, one in blocks[layer].items()
        }
        nbytes = sum(one.nbytes for one in sources.values())
        if not self.take(nbytes):
            return None
        try:
            tensors = {name: empty_tensor(one.spec) for name, one in sources.items()}
            await moves.gather(list(sources.values()), list(tensors.values()), mark)
        except BaseException:
            self.release(nbytes)
            raise
        self.copies += 1
        return StagedCopy(self, tensors, moves.pool)

    def take(self, nbytes: int) -> bool:
        """Take so much room, if there is; who gets it releases it. Never waits."""
        if self.used_bytes + nbytes > self.max_bytes:
            return False
        self.used_bytes += nbytes
        return True

    def release(self, nbytes: int) -> None:
        """There is room for so much more. Never waits."""
        self.used_bytes -= nbytes
        self.more_room.set()
        self.more_room = asyncio.Event()


class StagedCopy:
    """The copies of one save's blocks, by layer and name."""

    def __init__(
        self,
        staging: Staging,
        tensors: dict[tuple[str, str], torch.Tensor],
        pool: CopyPool,
    ) -> None:
        self._staging = staging
        self._tensors = tensors
        self._pool = pool

    def tensor(self, layer: str, name: str) -> torch.Tensor:
        """Return one.

        :raises KeyError: it was dropped
        """
        return self._tensors[layer, name]

    def drop(self, layer: str | None = None) -> None:
        """Forget those of a layer, or all: nobody reads them. Again is nothing."""
        names = [one for one in self._tensors if layer in (None, one[0])]
        if not names:
            return
        dropped = [self._tensors.pop(name) for name in names]
        self._staging.release(sum(tensor.nbytes for tensor in dropped))
        self._pool.free(dropped)
