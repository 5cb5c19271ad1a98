"""What is on a GPU, brought to host memory for peers that get it by sockets."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable

from asynckv.buffers.host_copies import HostCopies
from asynckv.tensors.arena import Region
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.views import tensor_over
from asynckv.types import TensorSpec

__all__ = ("Hoisting",)

logger = logging.getLogger(__name__)


class Hoisting:
    """Copies for one peer, by ``pool``, one at a time, to memory of ``copies``."""

    def __init__(self, pool: CopyPool, copies: HostCopies) -> None:
        self._pool = pool
        self._copies = copies
        self._turn = asyncio.Lock()

    async def digest(
        self,
        region: Region,
        spec: TensorSpec,
        digested: Callable[[bytes], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Digest a region that came without one, then call one of the two.

        ``failed`` is called too if ``digested`` raises. Waits for no copy to be sent.
        A cancelled call has called neither.
        """
        async with self._turn:
            try:
                (digest,) = await self._pool.digest([region.place(spec)])
                digested(digest)
            except Exception as exc:
                logger.exception("an entry cannot be digested")
                failed(exc)

    async def hoist(
        self,
        region: Region,
        spec: TensorSpec,
        copied: Callable[[memoryview], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Copy a region when there is room for it, then call one of the two.

        ``failed`` is called too if ``copied`` raises. The room is others' when
        nothing refers to the copy any more. A cancelled call has called neither, and
        ends when the GPU is done.
        """
        memory = None
        try:
            memory = await self._copies.empty(spec.nbytes)
            async with self._turn:
                await self._copy(region, spec, memory)
            copied(memory)
        except Exception as exc:
            # Whatever it is: who waits for the bytes would wait for ever.
            traceback.clear_frames(exc.__traceback__)  # they keep the copy
            logger.exception("an entry cannot be read from its GPU")
            failed(exc)
        finally:
            memory = None  # whoever keeps the task keeps this frame

    async def _copy(self, region: Region, spec: TensorSpec, memory: memoryview) -> None:
        copying = self._pool.copy(
            [region.place(spec)], [tensor_over(memory, spec)], digest=False
        )
        del memory  # as there
        await copying
