"""What the two roles tell each other through vLLM, which pickles it."""

from __future__ import annotations

import dataclasses

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from asynckv.abc import (
    KVConnectorHandshake,
    KVConnectorMetadata as Orders,
    KVTransferResults,
)

__all__ = ("AsyncKVHandshake", "AsyncKVMetadata", "AsyncKVWorkerMetadata")


@dataclasses.dataclass
class AsyncKVMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers do in one step; mostly nothing.

    ``must_be_quiet``: requests whose blocks are overwritten, and that a save may still
    read.
    """

    orders: Orders | None = None
    must_be_quiet: frozenset[str] = frozenset()


@dataclasses.dataclass
class AsyncKVHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What one worker tells once its caches are registered.

    ``attention`` belongs to the fingerprint, which both roles must know.
    """

    handshake: KVConnectorHandshake | None
    attention: str


@dataclasses.dataclass
class AsyncKVWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What this rank's transfers came to, and why; vLLM has no place for that.

    vLLM itself tells of an end when all ranks have come to it, and with it of the ends
    of other connectors, if there are any.
    """

    ended: KVTransferResults

    @classmethod
    def of(cls, results: KVTransferResults) -> AsyncKVWorkerMetadata | None:
        """Return what ended of ``results``, if anything did."""
        if not (results.finished_recving or results.finished_sending):
            return None
        return cls(
            msgspec.structs.replace(results, invalid_block_ids=frozenset(), parts=())
        )

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return what two ranks say."""
        if not isinstance(other, AsyncKVWorkerMetadata):
            return self
        return AsyncKVWorkerMetadata(self.ended | other.ended)
