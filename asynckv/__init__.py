"""Moves LLM KV caches between processes: prefill here, decode there.

The names below are imported when they are first used, so that ``import
asynckv`` needs neither torch nor anything else that is slow. A new name takes
one row in ``_HOME`` and one import for type checkers; a test compares them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from asynckv.abc import (
        InsertWriter as InsertWriter,
        KVCacheBuffer as KVCacheBuffer,
        KVEntry as KVEntry,
        KVLookupBuffer as KVLookupBuffer,
        KVPipe as KVPipe,
        KVStoreBuffer as KVStoreBuffer,
        SelectStream as SelectStream,
    )
    from asynckv.buffers.lookup import LookupBuffer as LookupBuffer
    from asynckv.buffers.remote.peer import Peer as Peer, connect as connect
    from asynckv.buffers.serve import Server as Server, serve as serve
    from asynckv.buffers.store import StoreBuffer as StoreBuffer
    from asynckv.config import KVTransferConfig as KVTransferConfig
    from asynckv.errors import (
        AsyncKVError as AsyncKVError,
        AuthError as AuthError,
        BufferClosed as BufferClosed,
        ChecksumError as ChecksumError,
        ConfigError as ConfigError,
        EndOfStream as EndOfStream,
        EntryAborted as EntryAborted,
        EntryConflict as EntryConflict,
        EntryTooLarge as EntryTooLarge,
        GPUFailed as GPUFailed,
        GPUUnavailable as GPUUnavailable,
        IncompatiblePeer as IncompatiblePeer,
        LeaseLost as LeaseLost,
        Overloaded as Overloaded,
        PeerLost as PeerLost,
        PeerRestarted as PeerRestarted,
        PipeBroken as PipeBroken,
        ProtocolError as ProtocolError,
        WrongLoop as WrongLoop,
        WrongRole as WrongRole,
    )
    from asynckv.node import Node as Node, open as open
    from asynckv.pipes.endpoints import (
        listen_pipe as listen_pipe,
        open_pipe as open_pipe,
    )
    from asynckv.pipes.group import join_group as join_group
    from asynckv.security.tls import TLS as TLS
    from asynckv.stores.tiered import TieredStore as TieredStore
    from asynckv.tensors.blocks import KVBlocks as KVBlocks
    from asynckv.types import KVFingerprint as KVFingerprint, TensorSpec as TensorSpec

__version__ = "0.1.0"

_HOME: Final = {
    "AsyncKVError": "asynckv.errors",
    "AuthError": "asynckv.errors",
    "BufferClosed": "asynckv.errors",
    "ChecksumError": "asynckv.errors",
    "ConfigError": "asynckv.errors",
    "EndOfStream": "asynckv.errors",
    "EntryAborted": "asynckv.errors",
    "EntryConflict": "asynckv.errors",
    "EntryTooLarge": "asynckv.errors",
    "GPUFailed": "asynckv.errors",
    "GPUUnavailable": "asynckv.errors",
    "IncompatiblePeer": "asynckv.errors",
    "InsertWriter": "asynckv.abc",
    "KVBlocks": "asynckv.tensors.blocks",
    "KVCacheBuffer": "asynckv.abc",
    "KVEntry": "asynckv.abc",
    "KVFingerprint": "asynckv.types",
    "KVLookupBuffer": "asynckv.abc",
    "KVPipe": "asynckv.abc",
    "KVStoreBuffer": "asynckv.abc",
    "KVTransferConfig": "asynckv.config",
    "LeaseLost": "asynckv.errors",
    "LookupBuffer": "asynckv.buffers.lookup",
    "Node": "asynckv.node",
    "Overloaded": "asynckv.errors",
    "Peer": "asynckv.buffers.remote.peer",
    "PeerLost": "asynckv.errors",
    "PeerRestarted": "asynckv.errors",
    "PipeBroken": "asynckv.errors",
    "ProtocolError": "asynckv.errors",
    "SelectStream": "asynckv.abc",
    "Server": "asynckv.buffers.serve",
    "StoreBuffer": "asynckv.buffers.store",
    "TLS": "asynckv.security.tls",
    "TensorSpec": "asynckv.types",
    "TieredStore": "asynckv.stores.tiered",
    "WrongLoop": "asynckv.errors",
    "WrongRole": "asynckv.errors",
    "connect": "asynckv.buffers.remote.peer",
    "join_group": "asynckv.pipes.group",
    "listen_pipe": "asynckv.pipes.endpoints",
    "open": "asynckv.node",
    "open_pipe": "asynckv.pipes.endpoints",
    "serve": "asynckv.buffers.serve",
}

__all__ = tuple(_HOME)


if not TYPE_CHECKING:  # which would take it for a promise of any name

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value  # the next access does not come here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
