"""``copy_kv_blocks`` for an event loop, and the seam for an engine's own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Final

import torch

from asynckv.tensors.block_copies import (
    BlockIds,
    CopyBlocksOp,
    CopyDirection,
    block_copy_jobs,
)
from asynckv.tensors.cuda import Event
from asynckv.tensors.device_copying import CopyPool
from asynckv.tensors.jobs import CopyJob

__all__ = ("BlockCopier",)

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

        A cancelled call ends when no thread touches a cache any more: after the next
        piece (1 MiB; a whole layer between devices), but an engine's own operation runs
        to its end. Blocks of the destination may hold part of the copy then, as they
        may after an error.

        :raises ValueError: as ``copy_kv_blocks`` does; or the engine's operation needs
            a direction
        :raises IndexError: there is no block of that id
        :raises RuntimeError: the pool is closed, or the process can have no thread
        """
        marks = [*self._marks(src_kv_caches), *self._marks(dst_kv_caches)]
        make = functools.partial(
            self._jobs,
            self._operation,
            marks,
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
        else:
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
        marks: Sequence[Event],
        src_kv_caches: Mapping[str, torch.Tensor],
        dst_kv_caches: Mapping[str, torch.Tensor],
        src_block_ids: BlockIds,
        dst_block_ids: BlockIds,
        direction: CopyDirection | None,
    ) -> list[CopyJob]:
        for mark in marks:
            mark.synchronize()
            mark.close()
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
