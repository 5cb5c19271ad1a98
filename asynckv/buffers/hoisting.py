"""What is on a GPU, brought to host memory for peers that get it by sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import torch

from asynckv.tensors.arena import Region
from asynckv.tensors.copying import CopyPool
from asynckv.types import TensorSpec

__all__ = ("Hoisting",)

logger = logging.getLogger(__name__)


class Hoisting:
    """Copies for one peer, by ``pool``, one at a time."""

    def __init__(self, pool: CopyPool) -> None:
        self._pool = pool
        self._turn = asyncio.Lock()

    async def digest(
        self,
        region: Region,
        spec: TensorSpec,
        digested: Callable[[bytes], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """As :meth:`hoist`, of the digest of a region that came without one."""
        async with self._turn:
            try:
                (digest,) = await self._pool.digest([region.place(spec)])
            except Exception as exc:
                logger.exception("an entry cannot be digested")
                failed(exc)
            else:
                digested(digest)

    async def hoist(
        self,
        region: Region,
        spec: TensorSpec,
        copied: Callable[[torch.Tensor], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Copy a region when it is its turn, then call one of the two.

        A cancelled call has called neither, and ends when the GPU is done.
        """
        async with self._turn:
            try:
                copy = self._pool.host_empty(spec)
                await self._pool.copy([region.place(spec)], [copy], digest=False)
            except Exception as exc:
                # Whatever it is: who waits for the bytes would wait for ever.
                logger.exception("an entry cannot be read from its GPU")
                failed(exc)
            else:
                copied(copy)
