"""The worker side of a peer-to-peer connector: one rank's KV, to and from its peers."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from typing import Any

import anyio
import torch

from asynckv.abc import (
    KVConnectorHandshake,
    KVConnectorMetadata,
    KVConnectorWorker,
    KVTransferResults,
    SupportsCrossLayerCaches,
    SupportsHandshake,
    SupportsHeldBlocks,
    SupportsLayerwise,
    SupportsStreams,
)
from asynckv.config import KVTransferConfig
from asynckv.connectors.block_moves import BlockMoves
from asynckv.connectors.caches import PagedCaches
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.headers import EntryHeader
from asynckv.connectors.lifecycle import Life, LifeCounters
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.p2p_leaving import P2PLeaving
from asynckv.connectors.p2p_loads import P2PLoad
from asynckv.connectors.p2p_notices import P2PNotices
from asynckv.connectors.p2p_orders import LoadOrder, P2PMetadata, SaveOrder
from asynckv.connectors.p2p_routes import P2PRoutes
from asynckv.connectors.p2p_saves import P2PSave
from asynckv.connectors.staging import Staging
from asynckv.connectors.transfers import Transfers, reason_of
from asynckv.errors import GPUFailed
from asynckv.loops import LoopBound
from asynckv.observability.lines import as_line
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.cuda import Event
from asynckv.tensors.stagings import Stagings

__all__ = ("P2PWorker", "P2PWorkerStatistics")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class P2PWorkerStatistics:
    """One rank's transfers: under way, ended, and what was said of them in vain.

    ``staged_saves`` were copied since no step could wait for them, ``staged_bytes`` of
    them are left; ``late_saves`` were given up, as there was no room for that. From a
    GPU all is copied, and each layer is counted.
    """

    loading: int
    saving: int
    releasing: int
    loaded_bytes: int
    saved_bytes: int
    staged_bytes: int
    staged_saves: int
    late_saves: int
    connected_peers: int
    lost_peers: int
    lives: LifeCounters
    buffer: object


class P2PWorker(
    LoopBound,
    KVConnectorWorker,
    SupportsCrossLayerCaches,
    SupportsHandshake,
    SupportsHeldBlocks,
    SupportsLayerwise,
    SupportsStreams,
):
    """Moves what :class:`~asynckv.connectors.P2PScheduler` decides, for one rank.

    It serves its own buffer where it prefills and keeps (``pull``), or where it decodes
    and is sent to (``push``). ``wait_for_save`` waits for blocks, as
    :class:`P2PLeaving` says, not for peers; a save that takes ``save_timeout_s`` longer
    than its step is given up. An engine that holds the blocks of saves lets them finish
    until it wants the blocks. One that failed leaves an entry that says why, so that
    its loads fail at once. A load that hears nothing for
    ``load_timeout_s`` fails, as do all loads of a peer that is lost, at once.
    """

    metadata_type = P2PMetadata

    def __init__(
        self,
        config: KVTransferConfig,
        engine: KVEngine,
        *,
        stagings: Stagings | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.options = ConnectorOptions.of(config)
        self.routes = P2PRoutes(config, engine)
        self._pool = CopyPool(stagings=stagings)
        self._transfers = Transfers()
        self._staging = Staging(config.max_bytes)
        self._leaving = P2PLeaving(self._transfers, self._staging)
        self._notices = P2PNotices(self._transfers, self.routes, self.options)
        self._moves: BlockMoves | None = None
        self._orders: P2PMetadata | None = None
        self._saves: dict[Life, P2PSave] = {}
        self._held: dict[Life, P2PSave] = {}
        self._loads: dict[P2PLoad, Life] = {}
        self._awaited: list[P2PLoad] = []
        self._loaded_bytes = self._saved_bytes = 0
        self.routes.call_when_lost(self._on_lost)

    @property
    def wants_layers(self) -> bool:
        return self.options.layerwise

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

    async def start(self) -> None:
        self._check_loop()
        if self._transfers.is_closing:
            raise RuntimeError("this worker was closed: make another one")
        await self.routes.open()

    def get_handshake_metadata(self) -> KVConnectorHandshake | None:
        server = self.routes.server
        incarnation = "" if server is None else server.identity.incarnation
        return KVConnectorHandshake(self.engine.rank, incarnation)

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        """As the contract says; the saves of the step begin to listen for layers.

        :raises TypeError: it is another connector's
        :raises RuntimeError: no caches were registered
        """
        self._check_loop()
        if not isinstance(metadata, P2PMetadata):
            raise TypeError(f"{type(metadata).__name__} is another connector's")
        self._orders = metadata
        for order in metadata.saves:
            self._begin_save(order)

    def clear_connector_metadata(self) -> None:
        self._check_loop()
        self._orders = None
        self._awaited.clear()
        self._saves.clear()

    async def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        self._check_loop()
        # Taken, so that a second call in one step is nothing.
        orders, self._orders = self._orders or P2PMetadata(), None
        for order in orders.loads:
            try:
                if order.block_ids:
                    self._begin_load(order)
                else:
                    self._notices.release(order)
            except Exception as exc:
                # The loads after it are not less wanted.
                logger.exception("no load of %s began", as_line(order.request_id))
                if order.block_ids:
                    blocks = {block for group in order.block_ids for block in group}
                    self._transfers.refuse(
                        order.request_id, "recv", blocks, reason_of(exc)
                    )
        for request_id in orders.aborts:
            self._transfers.cancel(request_id, "recv")

    async def wait_for_layer_load(self, layer_name: str) -> None:
        self._check_loop()
        for load in list(self._awaited):
            await load.wait_for(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor | None = None,
        attn_metadata: object = None,
        **kwargs: object,
    ) -> None:
        self._check_loop()
        if self.options.layerwise and self._saves:
            mark = self._registered().now()
            for save in self._saves.values():
                save.offer(layer_name, mark)

    async def wait_for_save(self) -> None:
        await self.begin_to_wait()

    def begin_to_wait(self) -> Coroutine[Any, Any, None]:
        self._check_loop()
        saves = dict(self._saves)
        try:
            mark = self._registered().now() if saves else None
        except GPUFailed as exc:
            return self._give_up(saves, exc)
        return self._wait_for_saves(saves, mark)

    async def _wait_for_saves(
        self, saves: dict[Life, P2PSave], mark: Event | None
    ) -> None:
        for life, save in saves.items():
            save.offer_rest(mark)
            self._transfers.fail_after(life, self.options.save_timeout_s)
        if self.engine.holds_saved_blocks:
            self._held |= saves
            try:
                await self._leaving.leave_when_wanted(saves, self.routes.hang_up)
            finally:
                for life in saves:
                    self._held.pop(life, None)
        else:
            await self._leaving.leave(saves, self.routes.hang_up)

    async def _give_up(self, saves: dict[Life, P2PSave], error: GPUFailed) -> None:
        """Fail them: when their layers are computed cannot be known."""
        for life in saves:
            self._transfers.fail(life, reason_of(error))
        for save in saves.values():
            await save.quiet.wait()
        raise error

    def let_go_of_blocks(self, request_ids: Set[str] | None) -> None:
        self._check_loop()
        for save in self._held.values():
            if request_ids is None or save.order.request_id in request_ids:
                save.must_leave = True
        self._leaving.want()

    def get_finished(
        self, finished_req_ids: frozenset[str] = frozenset()
    ) -> KVTransferResults:
        self._check_loop()
        return self._transfers.results()

    def call_when_finished(self, callback: Callable[[], None]) -> None:
        self._check_loop_if_bound()
        self._transfers.call_when_ended(callback)

    def statistics(self) -> P2PWorkerStatistics:
        transfers, routes = self._transfers, self.routes
        return P2PWorkerStatistics(
            loading=transfers.count("recv"),
            saving=transfers.count("send"),
            releasing=transfers.others,
            loaded_bytes=self._loaded_bytes,
            saved_bytes=self._saved_bytes,
            staged_bytes=self._staging.used_bytes,
            staged_saves=self._staging.copies,
            late_saves=self._leaving.late,
            connected_peers=routes.peers.connected,
            lost_peers=routes.peers.lost,
            lives=dataclasses.replace(transfers.counters),
            buffer=None if routes.buffer is None else routes.buffer.statistics(),
        )

    async def aclose(self) -> None:
        """End every transfer, wait until memory is quiet, then close.

        A cancellation is held back until memory is quiet; then it closes at once.
        """
        self._check_loop()
        try:
            await self._transfers.aclose()
            with anyio.CancelScope(shield=True):
                await self.routes.aclose()
        finally:  # also if the task is cancelled: nothing stays open
            self.abort()

    def abort(self) -> None:
        self._transfers.abort()
        self.routes.abort()
        self._pool.close()

    def _register(self, caches: PagedCaches) -> None:
        self.config.check_device(str(caches.device))
        self._moves = BlockMoves(caches, self._pool)

    def _registered(self) -> BlockMoves:
        if self._moves is None:
            raise RuntimeError("register_kv_caches() comes first")
        return self._moves

    def _begin_load(self, order: LoadOrder) -> None:
        load = P2PLoad(
            self.engine,
            self._registered(),
            order,
            self.options.load_timeout_s,
        )
        life = self._transfers.begin(
            order.request_id,
            "recv",
            lambda: self._load(load),
            {block for group in order.block_ids for block in group},
            lambda: self._load_ended(load),
        )
        if life is None:
            return
        self._loads[load] = life
        if not order.is_async:
            self._awaited.append(load)

    def _on_lost(self, identity: str) -> None:
        """What it was to send will not come."""
        for load, life in list(self._loads.items()):
            rank = load.unseen_rank(identity)
            if rank is not None and not self.routes.has_pushed(load.order, rank):
                reason = f"PeerLost: {as_line(identity)} is gone, or has restarted"
                self._transfers.fail(life, reason)

    def _load_ended(self, load: P2PLoad) -> None:
        self._loads.pop(load, None)
        load.end()
        if not load.has_begun:  # its task was cancelled before its first step
            self._notices.release(load.order)

    async def _load(self, load: P2PLoad) -> None:
        try:
            await load.run(*self.routes.sources(load.order))
        finally:
            self._loaded_bytes += load.nbytes
            self._notices.release_all(load.order, load.untaken_sources)

    def _begin_save(self, order: SaveOrder) -> None:
        moves = self._registered()
        if order.refusal:
            self._notices.tell_failure(order, self._header_of(order), order.refusal)
            return
        save = P2PSave(
            moves,
            order,
            self._header_of(order),
            self.options.ttl_s,
            staging=self._staging,
            is_local=self.options.direction == "pull",
        )
        life: Life | None = self._transfers.begin(
            order.request_id,
            "send",
            lambda: self._save(save),
            ended=lambda: self._save_ended(save, life),
        )
        if life is None:
            reason = "an older save of that request has not ended"
            self._notices.tell_failure(order, self._header_of(order), reason)
        else:
            self._saves[life] = save

    def _header_of(self, order: SaveOrder) -> EntryHeader:
        return EntryHeader(
            engine_id=self.engine.engine_id,
            rank=self.engine.rank,
            block_size=self.engine.block_size,
            layers=self._registered().caches.layers,
            shape=self.engine.shape,
            salt=order.salt,
        )

    def _save_ended(self, save: P2PSave, life: Life | None) -> None:
        save.end()
        if life is not None and life.reason:
            header = self._header_of(save.order)
            self._notices.tell_failure(save.order, header, life.reason)

    async def _save(self, save: P2PSave) -> None:
        try:
            await save.run(self.routes.targets(save.order))
        finally:
            self._saved_bytes += save.nbytes
