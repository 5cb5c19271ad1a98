"""Blocks of a paged cache as one tensor. CPU memory only.

Nothing here copies a block: whoever moves them reads and writes them where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy
import numpy.typing
import torch

from asynckv.tensors.runs import Memory, Runs, runs_in
from asynckv.tensors.views import (
    bytes_of,
    check_into,
    check_landing_place,
    check_sendable,
    spec_of,
    tensor_over,
)
from asynckv.types import TensorSpec

__all__ = (
    "KVBlocks",
    "KVMemory",
    "Specified",
    "check_apart",
    "check_landing",
    "extent_of",
    "landing_of",
    "rows_of",
    "spec_in",
    "tensor_at",
    "tensor_in",
    "whole_numbers",
)

_ONLY_BLOCK: Final = numpy.zeros(1, numpy.int64)

_LEAST_ROW_NBYTES = 512
"""Shorter rows of a strided tensor are rather copied than sent one by one."""


class KVBlocks:
    """The rows ``block_ids`` of ``pool``, in that order, as if they were one tensor.

    What ``pool[block_ids]`` would copy is read, and written, where it lies: pass it
    to ``insert`` and ``put`` in a tensor's place, and in ``into``. The first
    dimension of ``pool`` counts blocks; each is contiguous, but they may lie apart:
    ``kv_cache[0]`` and ``kv_cache[:, 1]`` are pools too. Blocks that follow each
    other in memory move together, so sorted ids are cheaper than shuffled ones.

    :raises ValueError: a block is not plain contiguous CPU memory, or ids are no whole
        numbers
    :raises TypeError: the pool is no tensor
    :raises IndexError: there is no block of that id
    """

    __slots__ = ("block_ids", "pool", "shape")

    def __init__(
        self, pool: torch.Tensor, block_ids: Sequence[int] | torch.Tensor
    ) -> None:
        if not isinstance(pool, torch.Tensor):
            raise TypeError(
                f"a pool of blocks is a tensor, not a {type(pool).__name__}"
            )
        if pool.dim() < 1 or not _has_contiguous_rows(pool):
            raise ValueError("the blocks of the pool are not contiguous")
        self._set(pool, block_ids)

    def at(self, block_ids: Sequence[int]) -> KVBlocks:
        """Return blocks of the same pool, which is not looked at again.

        :raises ValueError: they are no whole numbers
        :raises IndexError: there is no block of that id
        """
        found = KVBlocks.__new__(KVBlocks)
        found._set(self.pool, block_ids)
        return found

    def _set(self, pool: torch.Tensor, block_ids: Sequence[int] | torch.Tensor) -> None:
        ids = whole_numbers(block_ids)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(pool):
            raise IndexError(f"a block id is outside of the pool's {len(pool)}")
        self.pool = pool
        self.block_ids = ids
        self.shape = torch.Size((len(ids), *pool.shape[1:]))

    def __repr__(self) -> str:
        return f"<KVBlocks {tuple(self.shape)} of {len(self.pool)}>"

    def __len__(self) -> int:
        return len(self.block_ids)

    @property
    def dtype(self) -> torch.dtype:
        """That of the pool."""
        return self.pool.dtype

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block."""
        return self.pool.element_size() * self.shape[1:].numel()

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return len(self) * self.block_nbytes

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype as of one tensor."""
        pool = spec_of(self.pool)
        return TensorSpec(tuple(self.shape), pool.dtype)

    @property
    def overlaps(self) -> bool:
        """Whether a byte is in it twice: then nothing can land in it."""
        step = self.pool.stride(0) * self.pool.element_size()
        if len(self) > 1 and step < self.block_nbytes:
            return True
        is_used = numpy.zeros(len(self.pool), dtype=bool)
        is_used[self.block_ids] = True
        return int(numpy.count_nonzero(is_used)) < len(self)

    def memory(self) -> Memory:
        """Return where the blocks lie."""
        step = self.pool.stride(0) * self.pool.element_size()
        return runs_in(extent_of(self.pool), self.block_ids * step, self.block_nbytes)


def whole_numbers(
    block_ids: Sequence[int] | torch.Tensor,
) -> numpy.typing.NDArray[numpy.int64]:
    """Return ids of blocks, copied.

    :raises ValueError: they are not one list of whole numbers
    """
    ids = numpy.asarray(block_ids)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise ValueError("block ids are one list of whole numbers")
    return ids.astype(numpy.int64)


class Specified(Protocol):
    """What can be moved in a tensor's place."""

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype as of one tensor."""


KVMemory: TypeAlias = torch.Tensor | KVBlocks
"""What a tensor's bytes come from, or land in."""


def rows_of(tensor: torch.Tensor) -> KVBlocks | None:
    """Return a strided tensor as its rows, if these can be moved as they lie."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    if not tensor.dim() or not _has_contiguous_rows(tensor):
        return None
    if tensor.element_size() * tensor.shape[1:].numel() < _LEAST_ROW_NBYTES:
        return None
    return KVBlocks(tensor, torch.arange(len(tensor), device="cpu"))


def landing_of(memory: KVMemory) -> KVMemory:
    """Return what a tensor can land in as it lies.

    :raises ValueError: nothing can: no plain memory, not contiguous and not in rows
        that are (on a GPU: not contiguous), or a block is there twice
    """
    if isinstance(memory, torch.Tensor) and memory.is_cuda:
        check_landing_place(memory)
        return memory
    found = memory if isinstance(memory, KVBlocks) else rows_of(memory) or memory
    if not isinstance(found, KVBlocks):
        bytes_of(found)
    elif found.overlaps:
        raise ValueError("a block is there twice: what should land in it?")
    return found


def check_apart(memories: Mapping[str, KVMemory]) -> None:
    """Refuse memory in which one tensor would land over another.

    :raises ValueError: two of them share a byte
    """
    places = [_Place.of(name, memory) for name, memory in memories.items()]
    # Only what lies within the same bounds is looked at block by block.
    near: list[_Place] = []
    reach = 0
    for place in sorted(one for one in places if one.first < one.end):
        if place.first >= reach:
            _check_near(near)
            near = []
        near.append(place)
        reach = max(reach, place.end)
    _check_near(near)


def check_landing(memory: KVMemory, spec: TensorSpec, name: str) -> None:
    """Refuse memory that cannot take the tensor ``name``.

    :raises ValueError: shape or dtype differ, or it is no plain CPU memory
    """
    if not isinstance(memory, KVBlocks):
        check_into(memory, spec, name)
    elif memory.spec != spec:
        found = memory.spec
        raise ValueError(
            f"into[{name!r}] is blocks of {found.dtype} {found.shape}, "
            f"the tensor is {spec.dtype} {spec.shape}"
        )


def tensor_in(memory: Memory, spec: TensorSpec) -> torch.Tensor | Runs:
    """Return what copies take of host memory: a tensor, or its places as they are."""
    return memory if isinstance(memory, Runs) else tensor_over(memory, spec)


def spec_in(memory: torch.Tensor | Specified) -> TensorSpec:
    """Return shape and dtype.

    :raises ValueError: it cannot be sent
    """
    return spec_of(memory) if isinstance(memory, torch.Tensor) else memory.spec


def tensor_at(memory: KVMemory) -> torch.Tensor:
    """Return the tensor that the caller knows it by: the pool of its blocks."""
    return memory.pool if isinstance(memory, KVBlocks) else memory


def extent_of(pool: torch.Tensor) -> memoryview:
    """Return the bytes from the first element of ``pool`` to its last one."""
    check_sendable(pool)
    row = pool.shape[1:].numel()
    count = (len(pool) - 1) * pool.stride(0) + row if len(pool) and row else 0
    return bytes_of(pool.detach().as_strided((count,), (1,)))


class _Place(NamedTuple):
    """Where the blocks of a pool may lie, or a tensor, which is one of no ``step``."""

    first: int
    end: int
    name: str
    step: int
    nbytes: int
    ids: numpy.typing.NDArray[numpy.int64]

    @classmethod
    def of(cls, name: str, memory: KVMemory) -> _Place:
        if not isinstance(memory, KVBlocks):
            first, nbytes = memory.data_ptr(), memory.nbytes
            return cls(first, first + nbytes, name, 0, nbytes, _ONLY_BLOCK)
        pool, nbytes = memory.pool, memory.block_nbytes
        first, step = pool.data_ptr(), pool.stride(0) * pool.element_size()
        ids = memory.block_ids
        end = first + (len(pool) - 1) * step + nbytes if len(ids) and nbytes else first
        return cls(first, end, name, step, nbytes, ids)


def _check_near(places: Sequence[_Place]) -> None:
    if len(places) < 2 or _are_apart_by_step(places):
        return
    pieces = [one.first + one.step * one.ids for one in places]
    starts = numpy.concatenate(pieces)
    owners = numpy.repeat(range(len(places)), [len(some) for some in pieces])
    order = numpy.argsort(starts, kind="stable")
    starts, owners = starts[order], owners[order]
    ends = starts + numpy.array([one.nbytes for one in places])[owners]
    for index in numpy.flatnonzero(starts[1:] < ends[:-1])[:1]:
        one, other = (places[owner].name for owner in owners[index : index + 2])
        raise ValueError(f"into[{one!r}] and into[{other!r}] share memory")


def _are_apart_by_step(places: Sequence[_Place]) -> bool:
    """Are they pools like ``kv_cache[:, i]``, or one pool with ids for each?

    Such blocks lie at multiples of one step. Those that begin elsewhere within it do
    not meet where there is room for them; of the others the ids are compared. A
    hundred times as fast as to sort them. ``False`` says nothing.
    """
    step = places[0].step
    if not step or any(one.step != step for one in places):
        return False
    lanes: dict[tuple[int, int], list[_Place]] = {}
    for one in places:
        lanes.setdefault((one.first % step, one.nbytes), []).append(one)
    order = sorted(lanes)
    nexts = [first for first, _ in order[1:]] + [order[0][0] + step]
    if any(first + n > after for (first, n), after in zip(order, nexts, strict=True)):
        return False
    return all(_are_other_ids(lane, step) for lane in lanes.values() if len(lane) > 1)


def _are_other_ids(lane: Sequence[_Place], step: int) -> bool:
    ids = numpy.concatenate([one.first // step + one.ids for one in lane])
    ids -= ids.min()
    is_used = numpy.zeros(ids.max() + 1, dtype=bool)
    is_used[ids] = True
    return int(numpy.count_nonzero(is_used)) == len(ids)


def _has_contiguous_rows(pool: torch.Tensor) -> bool:
    if pool.is_conj() or pool.is_neg() or pool.layout is not torch.strided:
        return False
    return not len(pool) or pool[0].is_contiguous()
