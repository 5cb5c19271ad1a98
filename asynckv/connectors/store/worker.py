"""The worker side of a store connector: one rank's blocks, to and from a store."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from typing import Any

import torch

from asynckv.abc import KVConnectorMetadata, KVStoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.caches import PagedCaches
from asynckv.connectors.connections import StoreConnection
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.requests import StoreMetadata
from asynckv.connectors.store.transfers import (
    BLOCKS_AT_ONCE,
    PackedBlocks,
    StoreLoading,
    StoreRank,
    StoreSaving,
)
from asynckv.connectors.transfers import TransferCounters
from asynckv.connectors.worker import CacheWorker
from asynckv.devices.cuda import Event
from asynckv.devices.lanes import DeviceLanes

__all__ = ("StoreWorker", "StoreWorkerStatistics")


@dataclasses.dataclass(frozen=True)
class StoreWorkerStatistics:
    """One rank's transfers.

    ``unsaved_blocks`` were not saved, as the store failed, or as it is slow, or for a
    gap before them: the latter two are ``skipped_blocks``.
    """

    loading: int
    saving: int
    loaded_blocks: int
    saved_blocks: int
    skipped_blocks: int
    unsaved_blocks: int
    loaded_bytes: int
    saved_bytes: int
    links: int
    transfers: TransferCounters


class StoreWorker(CacheWorker):
    """Loads and saves what :class:`~asynckv.connectors.StoreScheduler` decides.

    ``wait_for_save`` waits until blocks are copied to host memory, not until they are
    stored: that goes on beside the next steps. While 64 blocks, and 256 MiB, are on
    their way it waits for room: 0.2 s a step, and not at all for a store that has
    stored nothing since it was waited for in vain. What then has no room is skipped,
    and of the same prompt all that follows: nothing is sent behind a gap that is known.
    """

    metadata_type = StoreMetadata

    def __init__(
        self,
        config: KVTransferConfig,
        engine: KVEngine,
        store: KVStoreBuffer | None = None,
        *,
        lanes: DeviceLanes | None = None,
    ) -> None:
        super().__init__(config, engine, lanes=lanes)
        self._line = StoreConnection(config, engine, store, str(engine.rank))
        self._packed: PackedBlocks | None = None
        self._orders: StoreMetadata | None = None
        rank = StoreRank(
            *(engine, self.options, self._line, self._transfers),
            asyncio.Semaphore(BLOCKS_AT_ONCE),
            packed=self._packed_blocks,
            now=self._now,
        )
        self._loading = StoreLoading(rank)
        tells = not config.is_kv_consumer and engine.rank == 0
        self._saving = StoreSaving(rank, logs_losses=tells)

    async def start(self) -> None:
        """Nothing to open: the store is dialled when it is needed."""
        self._check_loop()

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        self._check_loop()
        if not isinstance(metadata, StoreMetadata):
            raise TypeError(f"{type(metadata).__name__} is another connector's")
        self._orders = metadata
        self._saving.bind(metadata.saves)

    def clear_connector_metadata(self) -> None:
        self._check_loop()
        self._orders = None
        self._saving.clear()

    async def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        self._check_loop()
        orders, self._orders = self._orders or StoreMetadata(), None
        for order in orders.loads:
            self._loading.begin(order)
        for request_id in orders.aborts:
            self._transfers.cancel(request_id, "recv")

    async def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads happen between steps: there is nothing to wait for."""
        self._check_loop()

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor | None = None,
        attn_metadata: object = None,
        **kwargs: object,
    ) -> None:
        """A block is saved whole, with all its layers: in :meth:`wait_for_save`."""
        self._check_loop()

    def begin_to_wait(self) -> Coroutine[Any, Any, None]:
        self._check_loop()
        return self._saving.begin_to_wait()

    async def flush(self) -> None:
        """Wait until everything that was saved is stored, or could not be.

        A cancelled call leaves no trace.
        """
        self._check_loop()
        await self._transfers.wait_others()

    def statistics(self) -> StoreWorkerStatistics:
        transfers, saving = self._transfers, self._saving
        block_nbytes = 0 if self._packed is None else self._packed.block_nbytes
        return StoreWorkerStatistics(
            loading=transfers.count("recv"),
            saving=transfers.others,
            loaded_blocks=self._loading.blocks,
            saved_blocks=saving.stored,
            skipped_blocks=saving.skipped,
            unsaved_blocks=saving.skipped + saving.failed,
            loaded_bytes=self._loading.blocks * block_nbytes,
            saved_bytes=saving.stored * block_nbytes,
            links=int(self._line.is_connected),
            transfers=dataclasses.replace(transfers.counters),
        )

    @property
    def _way(self) -> StoreConnection:
        return self._line

    def _register(self, caches: PagedCaches) -> None:
        super()._register(caches)
        self._packed = PackedBlocks(self._registered())

    def _now(self) -> Event | None:
        """Return where the engine's stream is."""
        return None if self._moves is None else self._moves.now()

    def _packed_blocks(self) -> PackedBlocks:
        if self._packed is None:
            raise RuntimeError("register_kv_caches() comes first")
        return self._packed
