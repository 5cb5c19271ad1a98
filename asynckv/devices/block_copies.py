"""``copy_kv_blocks``: blocks of every layer from one cache into another, at once.

What stages KV in host memory: from a device's cache into the host's, or back. For an
event loop it is done by the threads of a pool, and an engine may bring an operation of
its own.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import numpy
import numpy.typing
import torch

from asynckv.devices.copying import CopyPool, DeviceCopy
from asynckv.devices.cuda import Event
from asynckv.devices.lanes import DeviceLanes, DeviceRows
from asynckv.devices.marks import StreamMarks
from asynckv.devices.tensors import at_once, gpu_of
from asynckv.tensors.blocks import whole_numbers
from asynckv.tensors.jobs import CopyJob, Pace, run_jobs
from asynckv.tensors.runs import Memory, runs_in
from asynckv.tensors.views import bytes_of, check_plain

__all__ = (
    "BlockCopier",
    "BlockIds",
    "CopyBlocksOp",
    "CopyDirection",
    "block_copy_jobs",
    "copy_kv_blocks",
)


CopyDirection: TypeAlias = Literal["h2d", "d2h", "d2d"]

CopyBlocksOp: TypeAlias = Callable[
    [
        Mapping[str, torch.Tensor],
        Mapping[str, torch.Tensor],
        list[int],
        list[int],
        CopyDirection,
    ],
    None,
]
"""What an engine may bring instead: the same arguments as ``copy_kv_blocks``."""

BlockIds: TypeAlias = Sequence[int] | torch.Tensor

_PIECE_NBYTES: Final = 2**20

_LEAST_RUN_NBYTES: Final = 16 * 1024
"""Shorter runs are rather gathered together than copied one by one."""

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Ids: TypeAlias = numpy.typing.NDArray[numpy.int64]


def copy_kv_blocks(
    src_kv_caches: Mapping[str, torch.Tensor],
    dst_kv_caches: Mapping[str, torch.Tensor],
    src_block_ids: BlockIds,
    dst_block_ids: BlockIds,
    direction: CopyDirection | None = None,
    *,
    block_dim: int = 0,
) -> None:
    """Do ``dst[dst_block_ids] = src[src_block_ids]`` for each layer; it is done then.

    ``block_dim`` is the dimension that counts blocks: 1 where a layer is
    ``(2, blocks, ...)``. ``direction`` says which side is the host: ``"h2d"``,
    ``"d2h"``, or ``"d2d"`` for none; between two caches of the host it may be left
    out. Without ids nothing happens. Blocks that follow each other on both sides are
    copied together. Both sides may be one cache, where blocks may be read and written
    at once.

    It blocks; on an event loop use :class:`~asynckv.devices.block_copies.BlockCopier`.

    :raises ValueError: layers, lengths, shapes or dtypes differ, a block is written
        twice, a cache is no plain memory, or the direction is not what the devices say;
        nothing was copied then
    :raises TypeError: a cache is no tensor
    :raises IndexError: there is no block of that id; nothing was copied then
    """
    run_jobs(
        block_copy_jobs(
            src_kv_caches,
            dst_kv_caches,
            src_block_ids,
            dst_block_ids,
            direction,
            block_dim=block_dim,
        )
    )


def block_copy_jobs(
    src_kv_caches: Mapping[str, torch.Tensor],
    dst_kv_caches: Mapping[str, torch.Tensor],
    src_block_ids: BlockIds,
    dst_block_ids: BlockIds,
    direction: CopyDirection | None = None,
    *,
    block_dim: int = 0,
    lanes: DeviceLanes | None = None,
) -> list[CopyJob]:
    """Return what :func:`copy_kv_blocks` does, a job a layer, for a ``CopyPool``.

    With ``lanes`` blocks of a GPU are one job: gathered and scattered there for all
    layers, through pinned memory. Torch does it without, or where it must.
    They take milliseconds to be made: see ``make_and_run`` there.

    :raises ValueError: as that does
    :raises IndexError: as that does
    """
    sources, targets = whole_numbers(src_block_ids), whole_numbers(dst_block_ids)
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} blocks cannot go into {len(targets)}")
    if missing := src_kv_caches.keys() ^ dst_kv_caches.keys():
        raise ValueError(f"layers of one side only: {', '.join(sorted(missing))}")
    _check_direction(src_kv_caches, dst_kv_caches, direction)
    if not len(sources):
        return []
    if len(numpy.unique(targets)) != len(targets):
        raise ValueError("a block is there twice: what should land in it?")
    ends: list[tuple[_LayerBlocks, _LayerBlocks]] = []
    runs = _runs(sources, targets)
    extremes = [(int(ids.min()), int(ids.max())) for ids in (sources, targets)]
    pace = Pace()
    for layer, source in src_kv_caches.items():
        pace.keep()
        target = dst_kv_caches[layer]
        _check_layer(layer, source, target, block_dim)
        for (least, most), cache in zip(extremes, (source, target), strict=True):
            count = cache.shape[block_dim]
            if not 0 <= least <= most < count:
                raise IndexError(f"a block id is outside of the {count} of {layer}")
        ends.append(
            (
                _LayerBlocks(source, sources, block_dim),
                _LayerBlocks(target, targets, block_dim),
            )
        )
    if lanes is not None and _may_use_lanes(ends):
        pairs = [(at.end(lanes), to.end(lanes)) for at, to in ends]
        return [DeviceCopy(lanes, pairs)]
    return [_layer_copy(at, to, runs) for at, to in ends]


@dataclasses.dataclass(frozen=True)
class _LayerBlocks:
    """Some blocks of a layer: their ids, and the dimension that counts them."""

    cache: torch.Tensor
    ids: _Ids
    block_dim: int

    @property
    def piece_nbytes(self) -> int:
        """Bytes of a block that lie together."""
        tail = self.cache.shape[self.block_dim + 1 :]
        return tail.numel() * self.cache.element_size()

    def pieces(self) -> _Ids:
        """Return which pieces of the cache they are, in the order of its elements."""
        outer = self.cache.shape[: self.block_dim].numel()
        of_outer = numpy.arange(outer, dtype=numpy.int64)[:, None]
        return (of_outer * self.cache.shape[self.block_dim] + self.ids).ravel()

    def end(self, lanes: DeviceLanes) -> DeviceRows | Memory:
        """Return where they lie, on a GPU or on the host. The cache is contiguous."""
        pieces, nbytes = self.pieces(), self.piece_nbytes
        if gpu_of(self.cache) is None:
            starts = pieces * nbytes
            return runs_in(bytes_of(self.cache), starts, nbytes)
        memory = at_once(self.cache.detach(), lanes.tensors).memory
        table = self.cache.detach().view(-1, nbytes // self.cache.element_size())
        return DeviceRows(table.view(torch.uint8), pieces, memory)


def _may_use_lanes(ends: Sequence[tuple[_LayerBlocks, _LayerBlocks]]) -> bool:
    """Are blocks of one GPU read or written, and none of them read and written?

    Their caches are contiguous, and in no dimension empty.
    """
    layers = [layer for pair in ends for layer in pair]
    devices = {gpu_of(layer.cache) for layer in layers} - {None}
    if len(devices) != 1 or not all(one.piece_nbytes for one in layers):
        return False
    if not all(layer.cache.is_contiguous() for layer in layers):
        return False
    if any(gpu_of(layer.cache) is None for layer in layers):
        return True
    read, written = (_places_of(side) for side in zip(*ends, strict=True))
    return not _meet(read, written)


def _places_of(layers: Sequence[_LayerBlocks]) -> tuple[_Ids, _Ids]:
    """Return where each piece begins and ends, in the order of their beginnings."""
    pieces = [
        (one.cache.data_ptr() + one.pieces() * one.piece_nbytes, one.piece_nbytes)
        for one in layers
    ]
    starts = numpy.concatenate([some for some, _ in pieces])
    ends = numpy.concatenate([some + nbytes for some, nbytes in pieces])
    order = numpy.argsort(starts)
    return starts[order], ends[order]


def _meet(read: tuple[_Ids, _Ids], written: tuple[_Ids, _Ids]) -> bool:
    """Is a byte both read and written?"""
    starts, ends = written
    reach = numpy.maximum.accumulate(ends)
    before = numpy.searchsorted(starts, read[1])  # so many begin before it ends
    is_near = before > 0
    return bool((reach[before[is_near] - 1] > read[0][is_near]).any())


def _check_direction(
    sources: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    direction: str | None,
) -> None:
    if direction not in (None, "h2d", "d2h", "d2d"):
        raise ValueError(f"direction={direction!r} is none of 'h2d', 'd2h', 'd2d'")
    for layer, cache in (*sources.items(), *targets.items()):
        if not isinstance(cache, torch.Tensor):
            raise TypeError(f"{layer} is a {type(cache).__name__}, not a tensor")
    places = [
        {"h" if tensor.device.type == "cpu" else "d" for tensor in caches.values()}
        for caches in (sources, targets)
    ]
    if places[0] <= {"h"} and places[1] <= {"h"}:
        return  # the host may be the device as well
    if any(len(side) != 1 for side in places):
        raise ValueError("a cache is in host memory or on a device, not in both")
    found = "2".join(kind for side in places for kind in side)
    if direction != found:
        raise ValueError(f"direction={direction!r}, but the devices say {found!r}")


def _check_layer(
    layer: str, source: torch.Tensor, target: torch.Tensor, block_dim: int
) -> None:
    shapes = []
    for cache in (source, target):
        check_plain(cache)
        if not 0 <= block_dim < cache.dim():
            raise ValueError(f"{layer} has no dimension {block_dim}")
        shapes.append((cache.shape[:block_dim], cache.shape[block_dim + 1 :]))
    if shapes[0] != shapes[1] or source.dtype != target.dtype:
        raise ValueError(
            f"{layer} is {source.dtype} {tuple(source.shape)} on one side and "
            f"{target.dtype} {tuple(target.shape)} on the other"
        )


def _runs(sources: _Ids, targets: _Ids) -> list[tuple[int, int, int]]:
    """Return where blocks follow each other on both sides: source, target, how many."""
    is_first = numpy.ones(len(sources), dtype=bool)
    is_first[1:] = (numpy.diff(sources) != 1) | (numpy.diff(targets) != 1)
    (first,) = is_first.nonzero()
    counts = numpy.diff(first, append=len(sources))
    return list(
        zip(
            sources[first].tolist(),
            targets[first].tolist(),
            counts.tolist(),
            strict=True,
        )
    )


def _layer_copy(
    source: _LayerBlocks, target: _LayerBlocks, runs: Sequence[tuple[int, int, int]]
) -> CopyJob:
    at = source.cache.movedim(source.block_dim, 0)
    to = target.cache.movedim(target.block_dim, 0)
    return _LayerCopy(at, to, source.ids, target.ids, runs)


class _LayerCopy(CopyJob):
    """The blocks of one layer. The first dimension of both sides counts blocks."""

    def __init__(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        sources: _Ids,
        targets: _Ids,
        runs: Sequence[tuple[int, int, int]],
    ) -> None:
        self._source, self._target = _as_integers(source, target)
        self._sources, self._targets = sources, targets
        self._runs = runs
        self._block_nbytes = source.element_size() * source.shape[1:].numel()

    @property
    def nbytes(self) -> int:
        return self._block_nbytes * len(self._sources)

    def steps(self) -> Generator[None, None, None]:
        if self._source.device != self._target.device:
            yield from self._across_devices()
        elif self._overlaps():
            self._put(self._targets, self._take(self._sources))
            yield
        elif self.nbytes >= _LEAST_RUN_NBYTES * len(self._runs):
            yield from self._run_by_run()
        else:
            yield from self._gathered()

    def _overlaps(self) -> bool:
        (first, end), (start, stop) = map(_extent_of, (self._source, self._target))
        return first < stop and start < end

    def _across_devices(self) -> Iterator[None]:
        moved = self._take(self._sources).to(self._target.device)
        self._put(self._targets, moved)
        if self._target.is_cuda:
            torch.cuda.current_stream(self._target.device).synchronize()
        yield

    def _run_by_run(self) -> Iterator[None]:
        most = max(1, _PIECE_NBYTES // max(1, self._block_nbytes))
        for source, target, count in self._runs:
            for done in range(0, count, most):
                some = min(most, count - done)
                self._target.narrow(0, target + done, some).copy_(
                    self._source.narrow(0, source + done, some)
                )
                yield

    def _gathered(self) -> Iterator[None]:
        most = max(1, _PIECE_NBYTES // max(1, self._block_nbytes))
        for first in range(0, len(self._sources), most):
            part = slice(first, first + most)
            self._put(self._targets[part], self._take(self._sources[part]))
            yield

    def _take(self, ids: _Ids) -> torch.Tensor:
        if len(self._runs) == 1:
            taken = self._source.narrow(0, int(ids[0]), len(ids))
            return taken.clone() if self._overlaps() else taken
        return self._source.index_select(0, _index(ids, self._source))

    def _put(self, ids: _Ids, values: torch.Tensor) -> None:
        if len(self._runs) == 1:
            self._target.narrow(0, int(ids[0]), len(ids)).copy_(values)
        else:
            self._target.index_copy_(0, _index(ids, self._target), values)


def _as_integers(*caches: torch.Tensor) -> list[torch.Tensor]:
    """Return both as what torch can index in any case, which not every dtype is."""
    dtype = _INTEGERS.get(caches[0].element_size())
    if dtype is None or any(cache.is_conj() or cache.is_neg() for cache in caches):
        return [*caches]
    return [cache.detach().view(dtype) for cache in caches]


def _extent_of(cache: torch.Tensor) -> tuple[int, int]:
    """Return where it begins, and where its last element ends."""
    if not cache.numel():
        return 0, 0
    steps = zip(cache.shape, cache.stride(), strict=True)
    count = 1 + sum((length - 1) * step for length, step in steps)
    return cache.data_ptr(), cache.data_ptr() + count * cache.element_size()


def _index(ids: _Ids, tensor: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(ids).to(tensor.device)


_NEVER_AT_ONCE: Final = 2**20

_FEW_LAYERS: Final = 4
_FEW_BLOCKS: Final = 64


class BlockCopier:
    """Copies blocks between caches in the threads of ``pool``.

    :meth:`set_host_xfer_buffer_ops` lets an engine bring an operation of its own.
    """

    def __init__(self, pool: CopyPool, *, block_dim: int = 0) -> None:
        self._pool = pool
        self._block_dim = block_dim
        self._operation: CopyBlocksOp | None = None
        self._stream_marks = StreamMarks()

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp | None) -> None:
        """Let ``copy_operation`` do what is copied from now on; ``None``: we do again.

        It is called in a thread of the pool, and may block there.
        """
        self._operation = copy_operation

    async def copy(
        self,
        src_kv_caches: Mapping[str, torch.Tensor],
        dst_kv_caches: Mapping[str, torch.Tensor],
        src_block_ids: BlockIds,
        dst_block_ids: BlockIds,
        direction: CopyDirection | None = None,
    ) -> None:
        """Do what ``copy_kv_blocks`` does, and return when it is done.

        What that refuses is refused here before a byte moves, whoever copies. Up to
        64 KiB of a few blocks are copied at once, more never on the loop: there
        only one cache's device is looked at. The lists of ids may be changed meanwhile.

        Caches on a GPU are read and written when the caller's current stream of it has
        done what it was given until now; blocks of all layers then move together.

        A cancelled call ends when no thread touches a cache any more: at once before
        the first does, else after the next piece (1 MiB; a whole layer between
        devices), but an engine's own operation runs to its end. Blocks of the
        destination may hold part of the copy then, as they may after an error.

        :raises ValueError: as ``copy_kv_blocks`` does; or the engine's operation needs
            a direction
        :raises IndexError: there is no block of that id
        :raises GPUFailed: CUDA failed, or the caller's stream does not get on
        :raises RuntimeError: the pool is closed, or the process can have no thread
        """
        marks = [*self._marks(src_kv_caches), *self._marks(dst_kv_caches)]
        make = functools.partial(
            self._jobs,
            self._operation,
            src_kv_caches,
            dst_kv_caches,
            _kept(src_block_ids),
            _kept(dst_block_ids),
            direction,
        )
        blocks = max(len(src_block_ids), len(dst_block_ids))
        is_small = len(src_kv_caches) <= _FEW_LAYERS and blocks <= _FEW_BLOCKS
        if is_small and not marks:
            await self._pool.run(make())
            return
        for mark in marks:
            await self._stream_marks.reached(mark)
            mark.close()
        await self._pool.make_and_run(make)

    def _marks(self, caches: Mapping[str, torch.Tensor]) -> Iterator[Event]:
        """Mark where the caller's stream is, whose thread this is: not the pool's."""
        for cache in caches.values():
            if cache.is_cuda:
                nothing = cache.detach().as_strided((0,), (1,))
                ready = self._pool.lanes.tensors.memory_of(nothing).ready
                if ready is not None:
                    yield ready
            return

    def _jobs(
        self,
        operation: CopyBlocksOp | None,
        src_kv_caches: Mapping[str, torch.Tensor],
        dst_kv_caches: Mapping[str, torch.Tensor],
        src_block_ids: BlockIds,
        dst_block_ids: BlockIds,
        direction: CopyDirection | None,
    ) -> list[CopyJob]:
        jobs = block_copy_jobs(
            src_kv_caches,
            dst_kv_caches,
            src_block_ids,
            dst_block_ids,
            direction,
            block_dim=self._block_dim,
            lanes=self._pool.lanes if operation is None else None,
        )
        if operation is None or not jobs:
            return jobs
        if direction is None:
            raise ValueError("the engine's operation needs a direction")
        call = functools.partial(
            operation,
            src_kv_caches,
            dst_kv_caches,
            [int(block_id) for block_id in src_block_ids],
            [int(block_id) for block_id in dst_block_ids],
            direction,
        )
        return [_Operation(call)]


def _kept(block_ids: BlockIds) -> BlockIds:
    """Return ids that nobody else changes."""
    if isinstance(block_ids, torch.Tensor):
        return block_ids.clone()
    return copy.copy(block_ids)


class _Operation(CopyJob):
    """One call of an engine's own operation."""

    def __init__(self, operation: Callable[[], None]) -> None:
        self._operation = operation

    @property
    def nbytes(self) -> int:
        return _NEVER_AT_ONCE

    def steps(self) -> Generator[None, None, None]:
        self._operation()
        yield
