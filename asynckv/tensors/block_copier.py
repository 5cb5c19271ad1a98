"""``copy_kv_blocks`` for an event loop, and the seam for an engine's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch

from asynckv.tensors.block_copies import (
    BlockIds,
    CopyBlocksOp,
    CopyDirection,
    block_copy_jobs,
)
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.jobs import CopyJob

__all__ = ("BlockCopier",)

_NEVER_AT_ONCE: Final = 2**20


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

        What that refuses is refused here at once, whoever copies. Up to 64 KiB are
        copied at once, more never on the loop.

        A cancelled call ends when no thread touches a cache any more: after the next
        piece (1 MiB; a whole layer between devices), but an engine's own operation runs
        to its end. Blocks of the destination may hold part of the copy then, as they
        may after an error.

        :raises ValueError: as ``copy_kv_blocks`` does; or the engine's operation needs
            a direction
        :raises IndexError: there is no block of that id
        :raises RuntimeError: the pool is closed, or the process can have no thread
        """
        jobs = block_copy_jobs(
            src_kv_caches,
            dst_kv_caches,
            src_block_ids,
            dst_block_ids,
            direction,
            block_dim=self._block_dim,
        )
        if self._operation is not None and jobs:
            if direction is None:
                raise ValueError("the engine's operation needs a direction")
            operation = functools.partial(
                self._operation,
                src_kv_caches,
                dst_kv_caches,
                [int(block_id) for block_id in src_block_ids],
                [int(block_id) for block_id in dst_block_ids],
                direction,
            )
            jobs = [_Operation(operation)]
        await self._pool.run(jobs)


class _Operation(CopyJob):
    """One call of an engine's own operation."""

    def __init__(self, operation: Callable[[], None]) -> None:
        self._operation = operation

    @property
    def nbytes(self) -> int:
        return _NEVER_AT_ONCE

    def steps(self) -> Iterator[None]:
        self._operation()
        yield
