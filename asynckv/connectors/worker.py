"""What workers have in common: their steps, and the caches of one rank."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import anyio
import torch

from asynckv.abc import (
    KVConnectorMetadata,
    KVConnectorWorker,
    KVTransferResults,
    SupportsCrossLayerCaches,
    SupportsStreams,
)
from asynckv.affinity import LoopBound
from asynckv.config import KVTransferConfig
from asynckv.connectors.caches import BlockMoves, PagedCaches
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.requests import (
    LoadRequest,
    StoreRequest,
)
from asynckv.connectors.transfers import Transfers, reason_of
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import Event
from asynckv.devices.lanes import DeviceLanes
from asynckv.observability.lines import as_line

__all__ = ("CacheWorker", "Loading")

logger = logging.getLogger(__name__)


class Loading(abc.ABC):
    """Begins the loads of one rank.

    What cannot be begun is said to have failed: others are not less wanted.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    @abc.abstractmethod
    def _begin(self, request: Any) -> None:
        """Begin what is not refused. Never waits."""

    def begin_all(self, step: Any) -> None:
        """Issue the loads of a step, and end those that it aborts. Never waits."""
        for request in step.loads:
            self.begin(request)
        for request_id in step.aborts:
            self._transfers.cancel(request_id, "recv")

    def begin(self, request: LoadRequest | StoreRequest) -> None:
        """Begin a load. Never waits, never raises."""
        refusal = request.refusal
        try:
            if not refusal:
                self._begin(request)
        except Exception as exc:
            # Whatever it is: the request would wait for this load for ever.
            logger.exception("no load of %s began", as_line(request.request_id))
            refusal = reason_of(exc)
        if refusal and (request.block_ids or request.refusal):
            blocks = request.block_ids
            self._transfers.refuse(request.request_id, "recv", blocks, refusal)

    @abc.abstractmethod
    def clear(self) -> None:
        """The step is over: it waits for no load any more."""


class _Saving(Protocol):
    """Begins the saves of one rank."""

    def bind(self, step: Any) -> None:
        """A step begins, with these saves. Never waits."""

    def begin_to_wait(self) -> Coroutine[Any, Any, None]:
        """All is computed; return what waits until the step's blocks are not read."""

    def clear(self) -> None:
        """The step is over. What is waited for goes on."""


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

    _loading: Loading
    _saving: _Saving
    _connections: _Connections
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
        self._step: KVConnectorMetadata | None = None

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        """As the contract says; the saves of the step begin.

        :raises TypeError: it is another connector's
        :raises RuntimeError: no caches were registered
        """
        self._check_loop()
        if not isinstance(metadata, self.metadata_type):
            raise TypeError(f"{type(metadata).__name__} is another connector's")
        self._step = metadata
        self._saving.bind(metadata)

    def clear_connector_metadata(self) -> None:
        self._check_loop()
        self._step = None
        self._loading.clear()
        self._saving.clear()

    async def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        self._check_loop()
        # Taken, so that a second call in one step is nothing.
        step, self._step = self._step, None
        if step is not None:
            self._loading.begin_all(step)

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

    def begin_to_wait(self) -> Coroutine[Any, Any, None]:
        """As ``wait_for_save``, of the step that is now, whenever it is awaited."""
        self._check_loop()
        return self._saving.begin_to_wait()

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
