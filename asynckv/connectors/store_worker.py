"""The worker side of a store connector: one rank's blocks, to and from a store."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import anyio
import torch

from asynckv.abc import (
    BlockIds,
    KVConnectorMetadata,
    KVConnectorWorker,
    KVStoreBuffer,
    KVTransferResults,
    SupportsCrossLayerCaches,
)
from asynckv.config import KVTransferConfig
from asynckv.connectors.caches import PagedCaches
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.keys import rank_block_keys
from asynckv.connectors.lifecycle import LifeCounters
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.spool import Spool
from asynckv.connectors.store_line import StoreLine
from asynckv.connectors.store_orders import StoreMetadata, StoreOrder
from asynckv.connectors.store_shapes import SHAPE_KEY, StoredShape, namespace_of
from asynckv.connectors.transfers import Transfers, reason_of
from asynckv.errors import EntryAborted
from asynckv.loops import LoopBound
from asynckv.observability.lines import as_line
from asynckv.tensors.copying import CopyPool

__all__ = ("StoreWorker", "StoreWorkerStatistics")

_BLOCKS_AT_ONCE: Final = 16
_STAGED_BLOCKS: Final = 64

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StoreWorkerStatistics:
    """One rank's transfers.

    ``unsaved_blocks`` were not saved, as the store failed, or as too many were staged:
    those are ``skipped_blocks``.
    """

    loading: int
    saving: int
    loaded_blocks: int
    saved_blocks: int
    skipped_blocks: int
    unsaved_blocks: int
    loaded_bytes: int
    saved_bytes: int
    lives: LifeCounters


class StoreWorker(LoopBound, KVConnectorWorker, SupportsCrossLayerCaches):
    """Loads and saves what :class:`~asynckv.connectors.StoreScheduler` decides.

    ``wait_for_save`` waits until blocks are copied, not until they are stored: that
    goes on beside the next steps. While more than 64 blocks are on their way further
    ones are skipped: a slow store slows no engine down.
    """

    metadata_type = StoreMetadata

    def __init__(
        self,
        config: KVTransferConfig,
        engine: KVEngine,
        store: KVStoreBuffer | None = None,
    ) -> None:
        self.engine = engine
        self.options = ConnectorOptions.of(config)
        self._namespace = namespace_of(engine)
        self._line = StoreLine(config, engine, store, str(engine.rank))
        self._pool = CopyPool()
        self._transfers = Transfers()
        self._spool: Spool | None = None
        self._orders: StoreMetadata | None = None
        self._saves: list[tuple[str, BlockIds, int]] = []
        self._at_once = asyncio.Semaphore(_BLOCKS_AT_ONCE)
        self._loaded_blocks = self._saved_blocks = self._skipped_blocks = 0
        self._failed_blocks = 0
        self._is_told = False

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        groups: Mapping[str, int] | None = None,
    ) -> None:
        caches = PagedCaches(kv_caches, self.engine.shape, groups)
        self._spool = Spool(caches, self._pool)

    def register_cross_layers_kv_cache(
        self, kv_cache: torch.Tensor, layer_names: Sequence[str]
    ) -> None:
        caches = PagedCaches.across_layers(kv_cache, layer_names, self.engine.shape)
        self._spool = Spool(caches, self._pool)

    async def start(self) -> None:
        """Nothing to open: the store is dialled when it is needed."""
        self._check_loop()

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        self._check_loop()
        if not isinstance(metadata, StoreMetadata):
            raise TypeError(f"{type(metadata).__name__} is another connector's")
        self._orders = metadata
        self._saves = [
            (key, order.block_ids, index)
            for order in metadata.saves
            for index, key in enumerate(self._keys_of(order))
        ]

    def clear_connector_metadata(self) -> None:
        self._orders, self._saves = None, []

    async def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        self._check_loop()
        orders, self._orders = self._orders or StoreMetadata(), None
        for order in orders.loads:
            try:
                self._begin_load(order)
            except Exception as exc:
                # The loads after it are not less wanted.
                logger.exception("no load of %s began", as_line(order.request_id))
                blocks = {block for group in order.block_ids for block in group}
                self._transfers.refuse(order.request_id, "recv", blocks, reason_of(exc))
        for request_id in orders.aborts:
            self._transfers.cancel(request_id, "recv")

    async def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads happen between steps: there is nothing to wait for."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor | None = None,
        attn_metadata: object = None,
        **kwargs: object,
    ) -> None:
        """A block is saved whole, with all its layers: in :meth:`wait_for_save`."""

    async def wait_for_save(self) -> None:
        self._check_loop()
        saves = self._saves  # of this step, also if the next begins meanwhile
        while saves:
            key, block_ids, index = saves[0]
            if self._transfers.others >= _STAGED_BLOCKS:
                self._skipped_blocks += 1
            else:
                value = await self._registered().gather(block_ids, index)
                put = functools.partial(self._put, key, value)
                self._transfers.begin_untold(put, f"put {key}")
            del saves[0]  # not before: a cancelled call has not saved it

    def get_finished(
        self, finished_req_ids: frozenset[str] = frozenset()
    ) -> KVTransferResults:
        return self._transfers.results()

    def call_when_finished(self, callback: Callable[[], None]) -> None:
        self._transfers.call_when_ended(callback)

    async def flush(self) -> None:
        """Wait until everything that was saved is stored, or could not be.

        A cancelled call leaves no trace.
        """
        await self._transfers.wait_others()

    def statistics(self) -> StoreWorkerStatistics:
        transfers = self._transfers
        block_nbytes = 0 if self._spool is None else self._spool.block_nbytes
        return StoreWorkerStatistics(
            loading=transfers.count("recv"),
            saving=transfers.others,
            loaded_blocks=self._loaded_blocks,
            saved_blocks=self._saved_blocks,
            skipped_blocks=self._skipped_blocks,
            unsaved_blocks=self._skipped_blocks + self._failed_blocks,
            loaded_bytes=self._loaded_blocks * block_nbytes,
            saved_bytes=self._saved_blocks * block_nbytes,
            lives=dataclasses.replace(transfers.counters),
        )

    async def aclose(self) -> None:
        self._check_loop()
        try:
            await self._transfers.aclose()
            with anyio.CancelScope(shield=True):
                await self._line.aclose()
        finally:  # also if the task is cancelled: nothing stays open
            self.abort()

    def abort(self) -> None:
        self._transfers.abort()
        self._line.abort()
        self._pool.close()

    def _registered(self) -> Spool:
        if self._spool is None:
            raise RuntimeError("register_kv_caches() comes first")
        return self._spool

    def _begin_load(self, order: StoreOrder) -> None:
        spool = self._registered()
        self._transfers.begin(
            order.request_id,
            "recv",
            lambda: self._load(order, spool),
            {block for group in order.block_ids for block in group},
        )

    def _keys_of(self, order: StoreOrder) -> list[str]:
        return rank_block_keys(order.block_keys, self._namespace, self.engine.rank)

    async def _load(self, order: StoreOrder, spool: Spool) -> None:
        keys = self._keys_of(order)
        async with asyncio.timeout(self.options.load_timeout_s):
            store = await self._line.store()
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
                            one = self._load_block(store, key, order, index, spool)
                            group.create_task(one)
                except ExceptionGroup as failed:
                    raise failed.exceptions[0] from None

    async def _load_block(
        self,
        store: KVStoreBuffer,
        key: str,
        order: StoreOrder,
        index: int,
        spool: Spool,
    ) -> None:
        async with self._at_once:
            value = await store.get(key)
            if value is None:
                raise EntryAborted("a block is not stored any more", reason="deleted")
            await spool.scatter(value, order.block_ids, index)
            self._loaded_blocks += 1

    async def _put(self, key: str, value: torch.Tensor) -> None:
        is_saved = False
        try:
            async with self._at_once, asyncio.timeout(self.options.save_timeout_s):
                store = await self._line.store()
                if not self._is_told:
                    await store.put(SHAPE_KEY, StoredShape.of(self.engine).tensor())
                    self._is_told = True
                await store.put(key, value)
                is_saved = True
        finally:
            self._saved_blocks += is_saved
            self._failed_blocks += not is_saved
