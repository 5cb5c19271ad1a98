"""Blocks of all layers as one value each, as a store keeps them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asynckv.abc import BlockIds
from asynckv.connectors.caches import PagedCaches
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.views import bytes_of

__all__ = ("Spool",)


class Spool:
    """Gathers a block from every layer's pools, and scatters it into them.

    What a block is in bytes is the order of the layers, and of the pools of each.
    """

    def __init__(self, caches: PagedCaches, pool: CopyPool) -> None:
        self._caches = caches
        self._pool = pool
        self.block_nbytes = sum(
            KVBlocks(region, ()).block_nbytes
            for layer in caches.layers
            for region in caches.pools(layer)
        )

    async def gather(self, block_ids: BlockIds, index: int) -> torch.Tensor:
        """Return the bytes of the blocks at ``index`` of each group.

        A cancelled call no longer reads the blocks.
        """
        value = torch.empty(self.block_nbytes, dtype=torch.uint8)
        parts = self._parts(value, block_ids, index)
        await self._pool.copy(
            [blocks for blocks, _ in parts], [part for _, part in parts], digest=False
        )
        return value

    async def scatter(
        self, value: torch.Tensor, block_ids: BlockIds, index: int
    ) -> None:
        """Put the bytes of one value into the blocks at ``index`` of each group.

        A cancelled call no longer writes to the blocks; they may hold a part.

        :raises ValueError: it is no value of these caches
        """
        if value.dtype != torch.uint8 or value.nbytes != self.block_nbytes:
            raise ValueError(
                f"a value of {value.nbytes} bytes is no block of {self.block_nbytes}"
            )
        parts = self._parts(value, block_ids, index)
        await self._pool.copy(
            [part for _, part in parts], [blocks for blocks, _ in parts], digest=False
        )

    def _parts(
        self, value: torch.Tensor, block_ids: BlockIds, index: int
    ) -> Sequence[tuple[KVBlocks, torch.Tensor]]:
        parts = []
        offset = 0
        for layer in self._caches.layers:
            block = block_ids[self._caches.group_of(layer)][index]
            for region in self._caches.pools(layer):
                blocks = KVBlocks(region, (block,))
                part = value[offset : offset + blocks.nbytes]
                offset += blocks.nbytes
                parts.append((blocks, part.view(blocks.dtype).view(blocks.shape)))
        bytes_of(value)  # it is plain memory, whoever made it
        return parts
