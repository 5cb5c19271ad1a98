"""The worker side of a peer-to-peer connector: one rank's KV, to and from its peers."""

from __future__ import annotations

import dataclasses
from collections.abc import Set

import torch

from asynckv.abc import (
    KVConnectorHandshake,
    SupportsHandshake,
    SupportsHeldBlocks,
    SupportsLayerwise,
)
from asynckv.config import KVTransferConfig
from asynckv.connectors.caches import PagedCaches, Staging
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.p2p.load import P2PLoading
from asynckv.connectors.p2p.routes import P2PNotifications, P2PRoutes
from asynckv.connectors.p2p.saves import P2PSaving
from asynckv.connectors.requests import P2PMetadata
from asynckv.connectors.transfers import TransferCounters
from asynckv.connectors.worker import CacheWorker
from asynckv.devices.lanes import DeviceLanes
from asynckv.devices.names import Device, device_named
from asynckv.errors import ConfigError

__all__ = ("P2PWorker", "P2PWorkerStatistics")


@dataclasses.dataclass(frozen=True)
class P2PWorkerStatistics:
    """One rank's transfers: under way, ended, and what was said of them in vain.

    ``staged_saves`` were copied since no step could wait for them, ``staged_bytes`` of
    them are left; ``late_saves`` were given up, as there was no room for that. From a
    GPU each layer that comes to the host is counted. ``links`` are up, whoever has
    dialled; ``connected_peers`` those that this side has.
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
    links: int
    transfers: TransferCounters
    buffer: object


class P2PWorker(CacheWorker, SupportsHandshake, SupportsHeldBlocks, SupportsLayerwise):
    """Moves what :class:`~asynckv.connectors.P2PScheduler` decides, for one rank.

    It serves its own buffer where it prefills and keeps (``pull``), or where it decodes
    and is sent to (``push``). ``wait_for_save`` waits for blocks, as
    :class:`~asynckv.connectors.p2p.saves.BlockRelease` says, not for peers; a save that
    takes ``save_timeout_s`` longer than its step is given up. An engine that holds the
    blocks of saves lets them finish until it wants the blocks. One that failed leaves
    an entry that says why, so that its loads fail at once. A load that hears nothing
    for ``load_timeout_s`` fails, as do all loads of a peer that is lost, at once.
    """

    metadata_type = P2PMetadata

    def __init__(
        self,
        config: KVTransferConfig,
        engine: KVEngine,
        *,
        lanes: DeviceLanes | None = None,
        device: Device | None = None,
    ) -> None:
        """``device`` is the GPU of the caches, where it is not told by its name."""
        super().__init__(config, engine, lanes=lanes)
        self._device = device
        self.routes = self._connections = P2PRoutes(config, engine)
        self._staging = Staging(config.max_bytes)
        notifications = P2PNotifications(self._transfers, self.routes, self.options)
        of_all = engine, self.options, self.routes, self._transfers, notifications
        self._loading: P2PLoading = P2PLoading(*of_all, moves=self._registered)
        self._saving: P2PSaving = P2PSaving(
            *of_all, moves=self._registered, staging=self._staging
        )

    @property
    def wants_layers(self) -> bool:
        return self.options.layerwise

    async def start(self) -> None:
        self._check_loop()
        if self._transfers.is_closing:
            raise RuntimeError("this worker was closed: make another one")
        device = self._buffer_device()
        if device is not None and self.routes.pushes and self._moves is not None:
            await self._moves.open_if_possible()  # nothing else is open yet
        await self.routes.open(device)

    def get_handshake_metadata(self) -> KVConnectorHandshake | None:
        server = self.routes.server
        incarnation = "" if server is None else server.identity.incarnation
        return KVConnectorHandshake(self.engine.rank, incarnation)

    async def wait_for_layer_load(self, layer_name: str) -> None:
        self._check_loop()
        for load in self._loading.awaited:
            await load.wait_for(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor | None = None,
        attn_metadata: object = None,
        **kwargs: object,
    ) -> None:
        self._check_loop()
        if self.options.layerwise:
            self._saving.offer(layer_name)

    def let_go_of_blocks(self, request_ids: Set[str] | None) -> None:
        self._check_loop()
        self._saving.let_go_of_blocks(request_ids)

    def statistics(self) -> P2PWorkerStatistics:
        transfers, routes = self._transfers, self.routes
        return P2PWorkerStatistics(
            loading=transfers.count("recv"),
            saving=transfers.count("send"),
            releasing=transfers.others,
            loaded_bytes=self._loading.nbytes,
            saved_bytes=self._saving.nbytes,
            staged_bytes=self._staging.used_bytes,
            staged_saves=self._staging.copies,
            late_saves=self._saving.late,
            connected_peers=routes.peers.connected,
            lost_peers=routes.peers.lost,
            links=routes.links,
            transfers=dataclasses.replace(transfers.counters),
            buffer=None if routes.buffer is None else routes.buffer.statistics(),
        )

    def _register(self, caches: PagedCaches) -> None:
        buffer, there = self.routes.buffer, str(caches.device)
        if buffer is not None and buffer.is_on_gpu and buffer.device != there:
            raise ConfigError(
                f"the buffer was opened on {buffer.device}, and the caches are on "
                f"{there}",
                hint="register them before start(), or say local_rank",
            )
        super()._register(caches)
        self.routes.push_from(self._buffer_device())

    def _buffer_device(self) -> Device | None:
        """Return the GPU that what waits, or is fetched, has memory of, if one's."""
        name = self.config.kv_buffer_device
        if name == "cpu":
            return None
        if self._moves is not None:
            name = str(self._moves.caches.device)
        return self._device or device_named(name, local_rank=self.config.local_rank)
