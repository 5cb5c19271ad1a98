"""What exists: pipe, buffers, connectors, and who moves the payload.

Read these pages first, in this order: :mod:`~asynckv.abc.pipes`,
:mod:`~asynckv.abc.entries`, :mod:`~asynckv.abc.buffers`,
:mod:`~asynckv.abc.steps`, :mod:`~asynckv.abc.connectors`,
:mod:`~asynckv.abc.transports`. Every implementation keeps these contracts; its own
docstrings say only what differs. Timeouts are the caller's ``asyncio.timeout(...)``,
and every object belongs to the event loop that first used it
(:exc:`~asynckv.errors.WrongLoop`). All names are imported from here.
"""

from __future__ import annotations

from asynckv.abc.buffers import (
    DropSelect,
    InsertWriter,
    KVCacheBuffer,
    KVCacheStatistics,
    KVLookupBuffer,
    KVLookupStatistics,
    KVStoreBuffer,
    KVStoreStatistics,
    PrefixMatch,
    SelectStream,
    StoredValue,
)
from asynckv.abc.connectors import (
    AsksElsewhere,
    CopyBlocksOp,
    KVConnectorScheduler,
    KVConnectorWorker,
    SupportsCrossLayerCaches,
    SupportsHandshake,
    SupportsHeldBlocks,
    SupportsHMA,
    SupportsHostCopies,
    SupportsLayerwise,
    SupportsStreams,
    TakesHandshakes,
    supports_hma,
)
from asynckv.abc.entries import KVEntry, KVSource, KVTensors, Match, TokenIds
from asynckv.abc.pipes import KVPipe
from asynckv.abc.steps import (
    BlockIds,
    KVAnswer,
    KVConnectorHandshake,
    KVConnectorMetadata,
    KVConnectorStep,
    KVQuestion,
    KVRequest,
    KVScheduled,
    KVTransferResults,
)
from asynckv.abc.tiers import (
    StoreTier,
    TierFacts,
    TierMemory,
    TierPrefix,
    TierResult,
    TierValue,
    WantedValue,
)
from asynckv.abc.transports import PayloadTransport

__all__ = (
    "AsksElsewhere",
    "BlockIds",
    "CopyBlocksOp",
    "DropSelect",
    "InsertWriter",
    "KVAnswer",
    "KVCacheBuffer",
    "KVCacheStatistics",
    "KVConnectorHandshake",
    "KVConnectorMetadata",
    "KVConnectorScheduler",
    "KVConnectorStep",
    "KVConnectorWorker",
    "KVEntry",
    "KVLookupBuffer",
    "KVLookupStatistics",
    "KVPipe",
    "KVQuestion",
    "KVRequest",
    "KVScheduled",
    "KVSource",
    "KVStoreBuffer",
    "KVStoreStatistics",
    "KVTensors",
    "KVTransferResults",
    "Match",
    "PayloadTransport",
    "PrefixMatch",
    "SelectStream",
    "StoreTier",
    "StoredValue",
    "SupportsCrossLayerCaches",
    "SupportsHMA",
    "SupportsHandshake",
    "SupportsHeldBlocks",
    "SupportsHostCopies",
    "SupportsLayerwise",
    "SupportsStreams",
    "TakesHandshakes",
    "TierFacts",
    "TierMemory",
    "TierPrefix",
    "TierResult",
    "TierValue",
    "TokenIds",
    "WantedValue",
    "supports_hma",
)
