"""What a buffer tells about itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from asynckv.abc import KVCacheStatistics, KVLookupStatistics, KVStoreStatistics

__all__ = ("Counters", "LookupStatistics", "StoreCounters", "StoreStatistics")


@dataclasses.dataclass(slots=True)
class Counters:
    """What has happened since the buffer was made."""

    inserted: int = 0
    delivered: int = 0
    acknowledged: int = 0
    given_back: int = 0
    lapsed: int = 0
    retracted: int = 0
    expired: int = 0
    withdrawn: int = 0
    undeliverable: int = 0
    dropped: int = 0
    aborted: int = 0
    direct: int = 0
    room_waits: int = 0
    match_waits: int = 0


@dataclasses.dataclass(frozen=True)
class _MemoryStatistics(KVCacheStatistics):
    """Of what a buffer of this process has in memory: see those of either kind."""

    peak_bytes: int
    pinned_bytes: int
    handed_out_bytes: int
    refused_slabs: int
    late_views: int


@dataclasses.dataclass(frozen=True)
class LookupStatistics(_MemoryStatistics, KVLookupStatistics):
    """A lookup buffer at one moment. Bytes are of the arena unless said otherwise.

    ``pinned_bytes`` are of entries that left while somebody still has a view of
    their memory; ``handed_out_bytes`` are those that the application took by a plain
    ``await`` and still has, in memory that comes back: they do not count towards
    ``max_bytes``. ``refused_slabs`` says how often the system had less memory than
    that, which is lower since. ``late_views`` counts the tensors that somebody still
    had a view of 10 s after their entry had left. ``mapped_by`` counts the
    tensors that each peer of this host reads where they lie, by the peer's id: they
    are pinned too. Of a buffer on a GPU it counts copies as well, which are in memory
    of the host.

    ``entries`` are committed or streaming, ``leased`` of them held by a
    consumer; ``waiting_inserts`` wait for room (``oldest_insert_wait_s`` the
    first of them), ``waiting_selects`` for a match. ``outside_bytes`` went
    straight to consumers and are charged to them. The counters count since the
    buffer was made; ``inserted`` are in, or were acknowledged before they had
    room; ``room_waits`` found the buffer full; ``expired``, ``withdrawn`` and
    ``undeliverable`` are the three named exceptions to "never lose", ``dropped``
    were left when the buffer was closed.
    """

    mapped_by: Mapping[str, int]
    outside_bytes: int
    entries: int
    leased: int
    oldest_insert_wait_s: float
    inserted: int
    delivered: int
    acknowledged: int
    given_back: int
    lapsed: int
    retracted: int
    expired: int
    withdrawn: int
    undeliverable: int
    dropped: int
    aborted: int
    direct: int
    room_waits: int
    match_waits: int


@dataclasses.dataclass(slots=True)
class StoreCounters:
    """What has happened in a store buffer since it was made."""

    puts: int = 0
    deletes: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    expired: int = 0
    room_waits: int = 0


@dataclasses.dataclass(frozen=True)
class StoreStatistics(_MemoryStatistics, KVStoreStatistics):
    """A store buffer at one moment.

    ``pinned_bytes``, ``handed_out_bytes``, ``refused_slabs`` and ``late_views`` are
    as for a lookup buffer.
    ``used_bytes`` are those of the ``keys`` stored, of puts under way, and of
    replaced or deleted values that somebody still reads. ``waiting_puts`` wait
    for room (``oldest_put_wait_s`` the first of them). The counters count since
    the buffer was made; ``evictions`` are keys dropped to make room, ``expired`` those
    whose time was over when they were looked for.
    """

    keys: int
    oldest_put_wait_s: float
    puts: int
    deletes: int
    evictions: int
    expired: int
    room_waits: int
