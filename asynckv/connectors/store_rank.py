"""What loading and saving of one rank have in common."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable

from asynckv.connectors.engine import KVEngine
from asynckv.connectors.keys import rank_block_keys
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.spool import Spool
from asynckv.connectors.store_line import StoreLine
from asynckv.connectors.store_orders import StoreOrder
from asynckv.connectors.store_shapes import namespace_of
from asynckv.connectors.transfers import Transfers
from asynckv.devices.cuda import Event

__all__ = ("StoreRank",)


@dataclasses.dataclass(frozen=True)
class StoreRank:
    """One rank of ``engine``, and its ``line`` to a store.

    ``spool`` returns what gathers and scatters blocks, and raises if there are no
    caches yet; ``now`` says where the engine's stream is. ``at_once`` bounds what is
    loaded and saved together.
    """

    engine: KVEngine
    options: ConnectorOptions
    line: StoreLine
    transfers: Transfers
    at_once: asyncio.Semaphore
    _: dataclasses.KW_ONLY
    spool: Callable[[], Spool]
    now: Callable[[], Event | None]

    def keys_of(self, order: StoreOrder) -> list[str]:
        """Return where the store has this rank's part of the order's blocks."""
        return rank_block_keys(order.block_keys, self._namespace, self.engine.rank)

    @functools.cached_property
    def _namespace(self) -> str:
        return namespace_of(self.engine)
