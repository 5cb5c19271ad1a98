"""The layers of one save, brought from a GPU to host memory as they are computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from asynckv.connectors.block_moves import BlockMoves
from asynckv.connectors.staging import StagedCopy, Staging
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.cuda import Event

__all__ = ("LayerGathering",)

_Offer: TypeAlias = "tuple[str, Event | None]"


class LayerGathering:
    """Copies layers to ``staging`` one after the other, in the order of their offers.

    ``gathered`` is called with each that is there. Where there is no room it waits for
    other layers to be dropped.
    """

    def __init__(
        self,
        moves: BlockMoves,
        staging: Staging,
        blocks_of: Callable[[str], dict[str, KVBlocks]],
        gathered: Callable[[str], None],
    ) -> None:
        self.is_waiting_for_room = False
        self.may_wait_for_room = True
        self._moves, self._staging = moves, staging
        self._blocks_of, self._gathered = blocks_of, gathered
        self._offers: asyncio.Queue[_Offer] = asyncio.Queue()
        self._copies: dict[str, StagedCopy] = {}

    def offer(self, layer: str, mark: Event | None) -> None:
        """The layer is computed at ``mark``: bring it soon. Never waits."""
        self._offers.put_nowait((layer, mark))

    def copy_of(self, layer: str) -> StagedCopy:
        """Return a layer that was gathered.

        :raises KeyError: it was not, or was dropped
        """
        return self._copies[layer]

    async def run(self, count: int) -> None:
        """Bring so many layers.

        When it ends, in whatever way, no block is read any more.

        :raises TimeoutError: there is no room, and it may not wait for that any more
        :raises GPUFailed: CUDA failed
        """
        for _ in range(count):
            layer, mark = await self._offers.get()
            blocks = {layer: self._blocks_of(layer)}
            copy = await self._staging.copy(blocks, self._moves, mark)
            while copy is None:
                if not self.may_wait_for_room:
                    raise TimeoutError("no room in host memory, and no time to wait")
                self.is_waiting_for_room = True
                await self._staging.more_room.wait()
                self.is_waiting_for_room = False
                copy = await self._staging.copy(blocks, self._moves, mark)
            self._copies[layer] = copy
            self._gathered(layer)

    def drop(self, layer: str | None = None) -> None:
        """Forget a layer, or all: nobody reads them. Never waits; again is nothing."""
        for name in [one for one in self._copies if layer in (None, one)]:
            self._copies.pop(name).drop()
