"""Layers of one save, brought from a GPU to host memory in the order of offers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from asynckv.connectors.block_moves import BlockMoves
from asynckv.connectors.staging import StagedCopy, Staging
from asynckv.devices.cuda import Event
from asynckv.tensors.blocks import KVBlocks

__all__ = ("LayerGathering",)

_Offer: TypeAlias = "tuple[str, Event | None]"


class LayerGathering:
    """Copies layers to ``staging`` one after the other, in the order of their offers.

    ``gathered`` is called with each that is there, or that nobody needs any more. Where
    there is no room it waits for other layers to be dropped.
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
        self._offers: asyncio.Queue[_Offer | None] = asyncio.Queue()
        self._copies: dict[str, StagedCopy] = {}
        self._dropped: set[str] = set()
        self._came: dict[str, asyncio.Event] = {}

    def offer(self, layer: str, mark: Event | None) -> None:
        """The layer is computed at ``mark``: bring it soon. Never waits."""
        self._offers.put_nowait((layer, mark))

    def copy_of(self, layer: str) -> StagedCopy:
        """Return a layer that was gathered.

        :raises KeyError: it was not, or was dropped
        """
        return self._copies[layer]

    def came(self, layer: str) -> asyncio.Event:
        """Return what is set once a layer is there."""
        return self._came.setdefault(layer, asyncio.Event())

    def finish(self) -> None:
        """Nothing more will be offered. Never waits."""
        self._offers.put_nowait(None)

    async def run(self) -> None:
        """Bring what is offered, until nothing more will be.

        When it ends, in whatever way, no block is read any more.

        :raises TimeoutError: there is no room, and it may not wait for that any more
        :raises GPUFailed: CUDA failed
        """
        while (offer := await self._offers.get()) is not None:
            await self._bring(*offer)

    async def _bring(self, layer: str, mark: Event | None) -> None:
        blocks, copy = {layer: self._blocks_of(layer)}, None
        while copy is None and layer not in self._dropped:
            copy = await self._staging.copy(blocks, self._moves, mark)
            if copy is None:
                await self._more_room()
        if copy is not None:
            self._copies[layer] = copy
        if layer in self._dropped:
            self.drop(layer)
        self._gathered(layer)
        self.came(layer).set()

    async def _more_room(self) -> None:
        if not self.may_wait_for_room:
            raise TimeoutError("no room in host memory, and no time to wait")
        self.is_waiting_for_room = True
        await self._staging.more_room.wait()
        self.is_waiting_for_room = False

    def drop(self, layer: str | None = None) -> None:
        """Forget a layer, or all: nobody reads them. Never waits; again is nothing.

        A layer that was not brought yet is not brought any more.
        """
        if layer is not None:
            self._dropped.add(layer)
            if self.is_waiting_for_room:
                self._staging.let_go(0)  # it may be the one that there is no room for
        for name in [one for one in self._copies if layer in (None, one)]:
            self._copies.pop(name).drop()
