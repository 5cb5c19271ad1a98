"""Which loads of one rank are under way, from a store into its caches."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import torch

from asynckv.abc import KVStoreBuffer
from asynckv.connectors.spool import Spool
from asynckv.connectors.store_orders import StoreOrder
from asynckv.connectors.store_rank import StoreRank
from asynckv.connectors.transfers import reason_of
from asynckv.devices.cuda import Event
from asynckv.errors import EntryAborted
from asynckv.observability.lines import as_line

__all__ = ("BLOCKS_AT_ONCE", "StoreLoading")

BLOCKS_AT_ONCE: Final = 16
"""So many blocks of one rank are asked for, or sent, at the most."""

logger = logging.getLogger(__name__)


class StoreLoading:
    """Begins loads. A block that is not stored any more fails all of its load."""

    def __init__(self, rank: StoreRank) -> None:
        self.blocks = 0
        """How many were loaded."""
        self._rank = rank

    def begin(self, order: StoreOrder) -> None:
        """Begin a load. Never waits.

        What cannot be begun is said to have failed: others are not less wanted.
        """
        blocks = {block for group in order.block_ids for block in group}
        rank, request_id = self._rank, order.request_id
        try:
            spool, mark = rank.spool(), rank.now()
            rank.transfers.begin(
                *(request_id, "recv", lambda: self.load(order, spool, mark), blocks)
            )
        except Exception as exc:
            # Whatever it is: the request would wait for this load for ever.
            logger.exception("no load of %s began", as_line(request_id))
            rank.transfers.refuse(request_id, "recv", blocks, reason_of(exc))

    async def load(
        self, order: StoreOrder, spool: Spool, mark: Event | None = None
    ) -> None:
        """Load these blocks. A cancelled call no longer writes to them.

        :raises EntryAborted: a block is not stored any more
        :raises PeerLost: nobody is there
        :raises TimeoutError: it took longer than ``load_timeout_s``
        """
        keys = self._rank.keys_of(order)
        async with asyncio.timeout(self._rank.options.load_timeout_s):
            store = await self._rank.line.store()
            async with store.pin(keys) as found:
                if not all(found):
                    raise EntryAborted(
                        f"{found.count(False)} of {len(keys)} blocks are not stored "
                        "any more",
                        reason="evicted",
                    )
                try:
                    async with asyncio.TaskGroup() as group:
                        for index, key in enumerate(keys):
                            scatter = functools.partial(
                                spool.scatter,
                                block_ids=order.block_ids,
                                index=index,
                                mark=mark,
                            )
                            group.create_task(self._load_block(store, key, scatter))
                except ExceptionGroup as failed:
                    raise failed.exceptions[0] from None

    async def _load_block(
        self,
        store: KVStoreBuffer,
        key: str,
        scatter: Callable[[torch.Tensor], Awaitable[None]],
    ) -> None:
        async with self._rank.at_once:
            value = await store.get(key)
            if value is None:
                raise EntryAborted("a block is not stored any more", reason="deleted")
            await scatter(value)
            self.blocks += 1
