"""Host memory for blocks of saves that no step waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import torch

from asynckv.connectors.block_moves import BlockMoves
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import Event
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.views import empty_tensor

__all__ = ("StagedCopy", "Staging")


class Staging:
    """Copies of blocks: at most ``max_bytes`` at once, counted until they are dropped
    (large ones are freed in a thread, a moment later).

    ``copies`` is how many were made.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.copies = 0
        self._has_room = asyncio.Event()

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
        if self.used_bytes + nbytes > self.max_bytes:
            return None
        self.used_bytes += nbytes
        try:
            tensors = {name: empty_tensor(one.spec) for name, one in sources.items()}
            await moves.gather(list(sources.values()), list(tensors.values()), mark)
        except BaseException:
            self.let_go(nbytes)
            raise
        self.copies += 1
        return StagedCopy(self, tensors, moves.pool)

    @property
    def more_room(self) -> asyncio.Event:
        """Set when something is dropped the next time."""
        return self._has_room

    def let_go(self, nbytes: int) -> None:
        """There is room for so much more. Never waits."""
        self.used_bytes -= nbytes
        self._has_room.set()
        self._has_room = asyncio.Event()


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
        self._staging.let_go(sum(tensor.nbytes for tensor in dropped))
        self._pool.free(dropped)
