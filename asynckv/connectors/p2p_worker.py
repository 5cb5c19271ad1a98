"""The worker side of a peer-to-peer connector: one rank's KV, to and from its peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from asynckv.abc import (
    KVConnectorHandshake,
    KVConnectorMetadata,
    KVConnectorWorker,
    KVTransferResults,
    SupportsCrossLayerCaches,
    SupportsHandshake,
    SupportsLayerwise,
)
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.options import ConnectorOptions

__all__ = ("P2PWorker",)


class P2PWorker(
    KVConnectorWorker, SupportsCrossLayerCaches, SupportsHandshake, SupportsLayerwise
):
    """Moves what :class:`P2PScheduler` decides, for ``engine.rank``."""

    def __init__(self, config: KVTransferConfig, engine: KVEngine) -> None:
        self.config = config
        self.engine = engine
        self.options = ConnectorOptions.of(config)

    @property
    def wants_layers(self) -> bool:
        return self.options.layerwise

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        groups: Mapping[str, int] | None = None,
    ) -> None:
        raise NotImplementedError

    def register_cross_layers_kv_cache(
        self, kv_cache: torch.Tensor, layer_names: Sequence[str]
    ) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        raise NotImplementedError

    def get_handshake_metadata(self) -> KVConnectorHandshake | None:
        raise NotImplementedError

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        raise NotImplementedError

    def clear_connector_metadata(self) -> None:
        raise NotImplementedError

    async def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        raise NotImplementedError

    async def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor | None = None,
        attn_metadata: object = None,
        **kwargs: object,
    ) -> None:
        raise NotImplementedError

    async def wait_for_save(self) -> None:
        raise NotImplementedError

    def get_finished(
        self, finished_req_ids: frozenset[str] = frozenset()
    ) -> KVTransferResults:
        raise NotImplementedError

    def call_when_finished(self, callback: Callable[[], None]) -> None:
        raise NotImplementedError

    def statistics(self) -> object:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        raise NotImplementedError
