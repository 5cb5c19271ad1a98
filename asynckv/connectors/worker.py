"""What workers have in common: the caches of one rank, and what moves its blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import anyio
import torch

from asynckv.abc import (
    KVConnectorWorker,
    KVTransferResults,
    SupportsCrossLayerCaches,
    SupportsStreams,
)
from asynckv.config import KVTransferConfig
from asynckv.connectors.caches import BlockMoves, PagedCaches
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.transfers import Transfers
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import Event
from asynckv.devices.lanes import DeviceLanes
from asynckv.loops import LoopBound

__all__ = ("CacheWorker",)


class _Connections(Protocol):
    """What leads to other processes."""

    async def aclose(self) -> None:
        """Say goodbye."""

    def abort(self) -> None:
        """Hang up. Never waits."""


class CacheWorker(
    LoopBound, KVConnectorWorker, SupportsCrossLayerCaches, SupportsStreams
):
    """The parent of the workers that move blocks of registered caches themselves."""

    @abstractmethod
    def begin_to_wait(self) -> Coroutine[Any, Any, None]:
        """As ``wait_for_save``, of the step that is now, whenever it is awaited."""

    @property
    @abstractmethod
    def _connections(self) -> _Connections:
        """What is closed when no transfer is under way any more."""

    def __init__(
        self,
        config: KVTransferConfig,
        engine: KVEngine,
        *,
        lanes: DeviceLanes | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.options = ConnectorOptions.of(config)
        self._pool = CopyPool(lanes=lanes)
        self._moves: BlockMoves | None = None
        self._transfers = Transfers()

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        groups: Mapping[str, int] | None = None,
    ) -> None:
        self._check_loop_if_bound()
        self._register(PagedCaches(kv_caches, self.engine.shape, groups))

    def register_cross_layers_kv_cache(
        self, kv_cache: torch.Tensor, layer_names: Sequence[str]
    ) -> None:
        self._check_loop_if_bound()
        shape = self.engine.shape
        self._register(PagedCaches.across_layers(kv_cache, layer_names, shape))

    def mark_stream(self) -> Event | None:
        return None if self._moves is None else self._moves.mark()

    def follow(self, mark: object) -> None:
        self._check_loop()
        if self._moves is not None:
            self._moves.follow(mark)

    async def wait_for_save(self) -> None:
        await self.begin_to_wait()

    def get_finished(
        self, finished_req_ids: frozenset[str] = frozenset()
    ) -> KVTransferResults:
        self._check_loop()
        return self._transfers.results()

    def call_when_finished(self, callback: Callable[[], None]) -> None:
        self._check_loop_if_bound()
        self._transfers.call_when_ended(callback)

    async def aclose(self) -> None:
        """End every transfer, wait until memory is quiet, then close.

        A cancellation is held back until memory is quiet; then it closes at once.
        """
        self._check_loop()
        try:
            await self._transfers.aclose()
            with anyio.CancelScope(shield=True):
                await self._connections.aclose()
        finally:  # also if the task is cancelled: nothing stays open
            self.abort()

    def abort(self) -> None:
        self._transfers.abort()
        self._connections.abort()
        self._pool.close()
        if self._moves is not None:
            self._moves.close()

    def _register(self, caches: PagedCaches) -> None:
        self.config.check_device(str(caches.device))
        self._moves = BlockMoves(caches, self._pool)

    def _registered(self) -> BlockMoves:
        if self._moves is None:
            raise RuntimeError("register_kv_caches() comes first")
        return self._moves
