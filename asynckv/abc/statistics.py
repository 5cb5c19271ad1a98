"""What every buffer tells about itself, wherever it is; each kind tells more."""

from __future__ import annotations

import dataclasses

__all__ = ("KVCacheStatistics", "KVLookupStatistics", "KVStoreStatistics")


@dataclasses.dataclass(frozen=True)
class KVCacheStatistics:
    """A buffer at one moment.

    ``used_bytes`` of ``max_bytes`` are in use. Of a buffer at a peer these are this
    side's: what was received and not handed over yet, and the bound of it.
    """

    max_bytes: int
    used_bytes: int


@dataclasses.dataclass(frozen=True)
class KVLookupStatistics(KVCacheStatistics):
    """A lookup buffer at one moment; of one at a peer, what this side asks of it.

    ``waiting_inserts`` wait for room, ``waiting_selects`` for a match.
    """

    waiting_inserts: int
    waiting_selects: int


@dataclasses.dataclass(frozen=True)
class KVStoreStatistics(KVCacheStatistics):
    """A store buffer at one moment; of one at a peer, what this side asks of it.

    ``waiting_puts`` wait for room. ``hits`` and ``misses`` count what ``get`` has found
    and not found since the buffer, or the connection, was made.
    """

    waiting_puts: int
    hits: int
    misses: int
