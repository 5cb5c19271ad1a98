"""Blocks of a paged cache as one tensor. CPU memory only.

Nothing here copies a block: whoever moves them reads and writes them where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy
import numpy.typing
import torch

from asynckv.tensors.on_gpu import KVOnGpu
from asynckv.tensors.runs import Memory, Runs, runs_in
from asynckv.tensors.views import (
    bytes_of,
    check_into,
    check_landing_place,
    check_sendable,
    spec_of,
)
from asynckv.types import TensorSpec

__all__ = (
    "KVBlocks",
    "KVMemory",
    "check_apart",
    "check_landing",
    "landing_of",
    "memory_of",
    "rows_of",
    "spec_in",
    "tensor_at",
)

_LEAST_ROW_NBYTES = 512
"""Shorter rows of a strided tensor are rather copied than sent one by one."""


class KVBlocks:
    """The rows ``block_ids`` of ``pool``, in that order, as if they were one tensor.

    What ``pool[block_ids]`` would copy is read, and written, where it lies: pass it
    to ``insert`` and ``put`` in a tensor's place, and in ``into``. The first
    dimension of ``pool`` counts blocks; each is contiguous, but they may lie apart:
    ``kv_cache[0]`` and ``kv_cache[:, 1]`` are pools too. Blocks that follow each
    other in memory move together, so sorted ids are cheaper than shuffled ones.

    :raises ValueError: a block is not plain contiguous CPU memory
    :raises IndexError: there is no block of that id
    """

    __slots__ = ("block_ids", "pool", "shape")

    def __init__(
        self, pool: torch.Tensor, block_ids: Sequence[int] | torch.Tensor
    ) -> None:
        ids = numpy.asarray(block_ids)
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise ValueError("block_ids is one list of whole numbers")
        if pool.dim() < 1 or not _has_contiguous_rows(pool):
            raise ValueError("the blocks of the pool are not contiguous")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(pool):
            raise IndexError(f"a block id is outside of the pool's {len(pool)}")
        self.pool = pool
        self.block_ids: numpy.typing.NDArray[numpy.int64] = ids.astype(numpy.int64)
        self.shape = torch.Size((len(ids), *pool.shape[1:]))

    def at(self, block_id: int) -> KVBlocks:
        """Return one block of the same pool, which is not looked at again.

        :raises IndexError: there is no block of that id
        """
        if not 0 <= block_id < len(self.pool):
            raise IndexError(f"a block id is outside of the pool's {len(self.pool)}")
        found = KVBlocks.__new__(KVBlocks)
        found.pool = self.pool
        found.block_ids = numpy.array((block_id,), numpy.int64)
        found.shape = torch.Size((1, *self.shape[1:]))
        return found

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
        return runs_in(_extent(self.pool), self.block_ids * step, self.block_nbytes)


KVMemory: TypeAlias = torch.Tensor | KVBlocks
"""What a tensor's bytes come from, or land in."""


def rows_of(tensor: torch.Tensor) -> KVBlocks | None:
    """Return a strided tensor as its rows, if these can be moved as they lie."""
    if tensor.is_contiguous() or not tensor.dim() or not _has_contiguous_rows(tensor):
        return None
    if tensor.element_size() * tensor.shape[1:].numel() < _LEAST_ROW_NBYTES:
        return None
    return KVBlocks(tensor, range(len(tensor)))


def landing_of(memory: KVMemory, *, may_be_on_gpu: bool = False) -> KVMemory:
    """Return what a tensor can land in as it lies.

    :raises ValueError: nothing can: no plain CPU memory, not contiguous and not
        in rows that are, or a block is there twice
    """
    if may_be_on_gpu and isinstance(memory, torch.Tensor) and memory.is_cuda:
        check_landing_place(memory, may_be_on_gpu=True)
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
    extents = sorted(
        (first, end, name)
        for name, memory in memories.items()
        for first, end in [_bounds(memory)]
        if first < end
    )
    # Only what lies within the same bounds is looked at block by block.
    near: list[str] = []
    reach = 0
    for first, end, name in [*extents, (0, 0, "")]:
        if name and first < reach:
            near.append(name)
            reach = max(reach, end)
            continue
        if len(near) > 1:
            _check_pieces([(one, memories[one]) for one in near])
        near, reach = [name], end


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


def memory_of(memory: KVMemory | Runs) -> Memory:
    """Return where the bytes of it lie, not copied.

    :raises ValueError: it has none that are its elements in order
    """
    if isinstance(memory, Runs):
        return memory
    return memory.memory() if isinstance(memory, KVBlocks) else bytes_of(memory)


def spec_in(memory: KVMemory | KVOnGpu) -> TensorSpec:
    """Return shape and dtype.

    :raises ValueError: it cannot be sent
    """
    return spec_of(memory) if isinstance(memory, torch.Tensor) else memory.spec


def tensor_at(memory: KVMemory) -> torch.Tensor:
    """Return the tensor that the caller knows it by: the pool of its blocks."""
    return memory.pool if isinstance(memory, KVBlocks) else memory


def _extent(pool: torch.Tensor) -> memoryview:
    """Return the bytes from the first element of ``pool`` to its last one."""
    check_sendable(pool)
    row = pool.shape[1:].numel()
    count = (len(pool) - 1) * pool.stride(0) + row if len(pool) and row else 0
    return bytes_of(pool.detach().as_strided((count,), (1,)))


def _starts(memory: KVMemory) -> tuple[numpy.typing.NDArray[numpy.int64], int]:
    """Return where each piece of it begins, and the length of one."""
    if not isinstance(memory, KVBlocks):
        return numpy.array([memory.data_ptr()], numpy.int64), memory.nbytes
    step = memory.pool.stride(0) * memory.pool.element_size()
    return memory.pool.data_ptr() + memory.block_ids * step, memory.block_nbytes


def _bounds(memory: KVMemory) -> tuple[int, int]:
    starts, nbytes = _starts(memory)
    if not len(starts) or not nbytes:
        return 0, 0
    return int(starts.min()), int(starts.max()) + nbytes


def _check_pieces(named: Sequence[tuple[str, KVMemory]]) -> None:
    pieces = [_starts(memory) for _, memory in named]
    starts = numpy.concatenate([some for some, _ in pieces])
    owners = numpy.repeat(range(len(named)), [len(some) for some, _ in pieces])
    order = numpy.argsort(starts, kind="stable")
    starts, owners = starts[order], owners[order]
    ends = starts + numpy.array([nbytes for _, nbytes in pieces])[owners]
    for index in numpy.flatnonzero(starts[1:] < ends[:-1])[:1]:
        one, other = (named[owner][0] for owner in owners[index : index + 2])
        raise ValueError(f"into[{one!r}] and into[{other!r}] share memory")


def _has_contiguous_rows(pool: torch.Tensor) -> bool:
    if pool.is_conj() or pool.is_neg() or pool.layout is not torch.strided:
        return False
    return not len(pool) or pool[0].is_contiguous()
