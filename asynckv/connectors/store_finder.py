"""Which blocks of prompts a store has. They stay there until a load can begin."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from asynckv.abc import KVStoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.keys import rank_block_keys
from asynckv.connectors.store_holds import StoreHolds
from asynckv.connectors.store_line import StoreLine
from asynckv.connectors.store_shapes import SHAPE_KEY, StoredShape, namespace_of

__all__ = ("StoreFinder",)

logger = logging.getLogger(__name__)

_ASK_S: Final = 5.0
_HELD_S: Final = 10.0
_MOST_HELD: Final = 256


class StoreFinder:
    """Asks a store for the parts of all ranks of an engine, and holds what is there."""

    def __init__(
        self, config: KVTransferConfig, engine: KVEngine, store: KVStoreBuffer | None
    ) -> None:
        self.line = StoreLine(config, engine, store, "scheduler")
        self.holds = StoreHolds(_HELD_S, _MOST_HELD)
        self.refused = ""
        """Why what another engine has saved there is of no use here."""
        self._engine = engine
        self._namespace = namespace_of(engine)

    async def find(self, keys: tuple[str, ...]) -> int:
        """Say how many of these blocks, from the first on, are there for every rank.

        A cancelled call holds nothing.

        :raises AsyncKVError: the store does not answer
        :raises OSError: so it is too
        :raises TimeoutError: it does not within 5 s
        """
        async with asyncio.timeout(_ASK_S):
            store = await self.line.store()
            counts = [
                await store.match_prefix(rank_block_keys(keys, self._namespace, rank))
                for rank in range(self._engine.size)
            ]
            if found := min(counts):
                return await self._hold(store, keys[:found])
            await self._compare(store)
            return 0

    async def aclose(self) -> None:
        """Hold nothing more, and say goodbye. Bounded and shielded."""
        try:
            await self.holds.aclose()
        finally:
            await self.line.aclose()

    def abort(self) -> None:
        """Hold nothing more, and hang up. Never waits."""
        self.holds.abort()
        self.line.abort()

    async def _hold(self, store: KVStoreBuffer, keys: tuple[str, ...]) -> int:
        """Say how many are there for every rank; they stay until a load can begin."""
        ranks, count = range(self._engine.size), len(keys)
        all_keys = [rank_block_keys(keys, self._namespace, rank) for rank in ranks]
        there = await self.holds.hold(store, [key for part in all_keys for key in part])
        parts = [there[rank * count : (rank + 1) * count] for rank in ranks]
        return min((*part, False).index(False) for part in parts)

    async def _compare(self, store: KVStoreBuffer) -> None:
        """Nothing was found: perhaps because who saves there is cut otherwise."""
        there = StoredShape.read(await store.get(SHAPE_KEY))
        refused = "" if there is None else there.differs_from(self._engine)
        if refused and refused != self.refused:
            logger.warning("blocks in the store are not for this engine: %s", refused)
        self.refused = refused
