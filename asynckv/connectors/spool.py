"""Blocks of all layers as one value each, as a store keeps them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec
import torch

from asynckv.abc import BlockIds
from asynckv.connectors.block_moves import BlockMoves
from asynckv.devices.cuda import Event
from asynckv.devices.tensors import gpu_of
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.views import bytes_of

__all__ = ("Spool",)

_MARK_NBYTES: Final = 64
"""The digest's. What follows it is aligned for every dtype."""


class Spool:
    """Gathers a block from every layer's pools, and scatters it into them.

    What a block is in bytes is the order of the layers, and of the pools of each,
    after a digest of what these are: their names, dtypes and shapes.
    """

    def __init__(self, moves: BlockMoves) -> None:
        caches = moves.caches
        self._moves = moves
        pools = [
            (layer, pool) for layer in caches.layers for pool in caches.pools(layer)
        ]
        none = [(layer, KVBlocks(pool, ())) for layer, pool in pools]
        told = [(layer, one.spec.dtype, one.spec.shape[1:]) for layer, one in none]
        digest = hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=_MARK_NBYTES)
        self._mark = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
        self._pools: list[tuple[int, KVBlocks, int]] = []
        """The group of each, none of its blocks, and where one begins in a value."""
        self.block_nbytes = _MARK_NBYTES
        for layer, one in none:
            self._pools.append((caches.group_of(layer), one, self.block_nbytes))
            self.block_nbytes += one.block_nbytes
        kinds = {(one.dtype, one.shape[1:]) for _, one in none}
        self._kind = kinds.pop() if len(kinds) == 1 else None
        """What all are, if that is the same."""

    async def gather(
        self, block_ids: BlockIds, index: int, mark: Event | None = None
    ) -> torch.Tensor:
        """Return the bytes of the blocks at ``index`` of each group, as at ``mark``.

        A cancelled call no longer reads the blocks.
        """
        value = torch.empty(self.block_nbytes, dtype=torch.uint8)
        value[:_MARK_NBYTES] = self._mark
        parts = self._parts(value, block_ids, index)
        await self._moves.gather(
            [blocks for blocks, _ in parts], [part for _, part in parts], mark
        )
        return value

    async def scatter(
        self,
        value: torch.Tensor,
        block_ids: BlockIds,
        index: int,
        mark: Event | None = None,
    ) -> None:
        """Put the bytes of one value into the blocks at ``index`` of each group.

        The value is in host memory, or on the GPU of the blocks, and ready there.
        A cancelled call no longer writes to the blocks; they may hold a part.

        :raises ValueError: it is no value of these caches
        """
        if value.dtype != torch.uint8 or value.nbytes != self.block_nbytes:
            raise ValueError(
                f"a value of {value.nbytes} bytes is no block of {self.block_nbytes}"
            )
        (told,) = await self._moves.fetch([value[:_MARK_NBYTES]])
        if not torch.equal(told, self._mark):
            raise ValueError("a value of other layers, or of another dtype or layout")
        parts = self._parts(value, block_ids, index)
        await self._moves.scatter(
            [part for _, part in parts], [blocks for blocks, _ in parts], mark
        )

    def _parts(
        self, value: torch.Tensor, block_ids: BlockIds, index: int
    ) -> Sequence[tuple[KVBlocks, torch.Tensor]]:
        spans = self._spans(block_ids, index)
        if gpu_of(value) is None:
            bytes_of(value)  # it is plain memory, whoever made it
        if self._kind is not None:  # a hundred layers one by one take a millisecond
            dtype, shape = self._kind
            typed = value[_MARK_NBYTES:].view(dtype).view(len(spans), 1, *shape)
            return [(blocks, typed[i]) for i, (blocks, _) in enumerate(spans)]
        parts = []
        for blocks, start in spans:
            part = value[start : start + blocks.nbytes]
            parts.append((blocks, part.view(blocks.dtype).view(blocks.shape)))
        return parts

    def _spans(self, block_ids: BlockIds, index: int) -> Sequence[tuple[KVBlocks, int]]:
        """Return the blocks, and where in a value each begins."""
        ids = [int(group[index]) for group in block_ids]
        return [(none.at(ids[group]), start) for group, none, start in self._pools]
