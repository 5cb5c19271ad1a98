"""What an engine calls: KV to a peer, to a store, or to several of these."""

from __future__ import annotations

from asynckv.connectors.engine import KVEngine, prefix_block_keys
from asynckv.connectors.registry import (
    CONNECTORS,
    KVConnectorKind,
    MultiConnector,
    P2PConnector,
    StoreConnector,
    find_connector,
    get_kv_connector_cache_layout,
    make_scheduler,
    make_worker,
)

__all__ = (
    "CONNECTORS",
    "KVConnectorKind",
    "KVEngine",
    "MultiConnector",
    "P2PConnector",
    "StoreConnector",
    "find_connector",
    "get_kv_connector_cache_layout",
    "make_scheduler",
    "make_worker",
    "prefix_block_keys",
)
