"""Which entries there are, where their bytes lie, and how those that left did.

Bytes lie in the arena, or outside, on their way to consumers. What is remembered of an
entry that left makes a repeated insert harmless. One timer serves all entries that have
a time to live. Rule of this file: every function is plain, and none knows of queries or
leases.
"""

from __future__ import annotations

import asyncio
import collections
import heapq
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from asynckv.buffers.entries.entries import Draft, EntryState, StoredEntry
from asynckv.buffers.statistics import Counters
from asynckv.devices.growth import allocate_but
from asynckv.errors import EntryAborted, EntryConflict, EntryTooLarge
from asynckv.tensors.arena import Arena

__all__ = (
    "LEAST_ACCOUNT_BYTES",
    "LEAST_ENTRIES",
    "EntryMemory",
    "EntryTable",
    "ExpiryClock",
    "Tombstone",
    "Tombstones",
)


LEAST_ACCOUNT_BYTES: Final = 64 * 2**20
"""What may be kept of entries beside their bytes, if a buffer is smaller."""

LEAST_ENTRIES: Final = 1024
_NBYTES_AN_ENTRY: Final = 2048
"""An entry costs 1.5 KB of Python: a buffer has one for each 2 KiB, or 1024."""


class EntryMemory:
    """What the entries of one buffer take of ``arena``, and beside it.

    ``outside_bytes`` have gone, or go, straight to consumers. ``has_more_outside`` is
    called when some of them are free again after somebody was refused some.
    """

    def __init__(
        self, arena: Arena, counters: Counters, has_more_outside: Callable[[], None]
    ) -> None:
        self.outside_bytes = 0
        self._arena = arena
        self._counters = counters
        self._has_more_outside = has_more_outside
        self._was_short_outside = False
        self._account_bytes = 0
        self._entries = 0

    @property
    def max_bytes(self) -> int:
        """What entries may take of the arena."""
        return self._arena.max_bytes

    def could_ever_fit(self, entry: StoredEntry) -> bool:
        """Could it be in the arena if that were empty?"""
        return self._arena.could_ever_fit(entry.sizes, entry.charged_bytes)

    def check_size(self, entry: StoredEntry) -> None:
        """Refuse what could not be in the arena if it were empty.

        :raises EntryTooLarge: it could never fit, or since memory was refused
        """
        if not self.could_ever_fit(entry):
            is_short = self._arena.refused_slabs
            raise EntryTooLarge(
                nbytes=entry.nbytes,
                max_bytes=self._arena.max_bytes,
                hint="the system refused this buffer more memory" if is_short else None,
            )

    def is_growing_for(self, entry: StoredEntry) -> bool:
        """Whether it waits for nobody, but for memory that the system is asked for."""
        return self._arena.is_growing and entry.nbytes <= self._arena.free_bytes

    def place(self, entry: StoredEntry) -> bool:
        """Take memory for an entry that waits for room, if it fits.

        What is kept of it beside its bytes has to fit too.
        """
        if not self._may_be_charged(entry):
            return False
        borrowed, arena = entry.draft.borrowed, self._arena
        if not borrowed:
            regions = arena.allocate(entry.sizes, entry.charged_bytes)
        else:
            regions = allocate_but(borrowed, arena, entry.sizes, entry.charged_bytes)
        if regions is None:
            return False
        self._charge(entry)
        entry.place_regions(regions)
        entry.in_arena = True
        streaming = entry.draft.streaming
        entry.state = EntryState.STREAMING if streaming else EntryState.FILLING
        return True

    def may_place_outside(self, nbytes: int) -> bool:
        """Are so many bytes free outside, for a peer, which pays for them?

        There are as many as in the arena, whatever peers say they can receive.
        """
        if self.outside_bytes + nbytes <= self._arena.max_bytes:
            return True
        self._was_short_outside = True
        return False

    def place_outside(self, entry: StoredEntry) -> None:
        """Somebody selects it while it waits: its bytes go straight there."""
        entry.place_regions(self._arena.allocate_outside(entry.sizes))
        entry.is_outside = True
        self.outside_bytes += entry.nbytes
        self._counters.direct += 1
        streaming = entry.draft.streaming
        entry.state = EntryState.STREAMING if streaming else EntryState.DIRECT

    def move_in(self, entry: StoredEntry) -> bool:
        """Charge the arena for a streaming entry that began outside, if it fits."""
        if not self._may_be_charged(entry):
            return False
        if not self._arena.adopt(entry.regions, entry.charged_bytes):
            return False
        self._charge(entry)
        entry.in_arena = True
        self.free_outside(entry)
        return True

    def free(self, entry: StoredEntry) -> None:
        """The entry leaves, wherever its bytes are; views keep those they show."""
        if entry.in_arena:
            self._arena.free(entry.regions, entry.charged_bytes)
            self._account_bytes -= entry.account_nbytes
            self._entries -= 1
        elif entry.is_outside:
            self.free_outside(entry)
        entry.drop_regions()

    def free_outside(self, entry: StoredEntry) -> None:
        """Its bytes are not outside any more."""
        entry.is_outside = False
        self.outside_bytes -= entry.nbytes
        if self._was_short_outside:
            self._was_short_outside = False
            self._has_more_outside()

    def _may_be_charged(self, entry: StoredEntry) -> bool:
        """Entries without a byte cost memory too: there is no end of them else."""
        bound = max(self._arena.max_bytes, LEAST_ACCOUNT_BYTES)
        account_bytes = self._account_bytes
        max_bytes = self._arena.max_bytes
        if self._entries >= max(LEAST_ENTRIES, max_bytes // _NBYTES_AN_ENTRY):
            return False
        return not account_bytes or account_bytes + entry.account_nbytes <= bound

    def _charge(self, entry: StoredEntry) -> None:
        self._account_bytes += entry.account_nbytes
        self._entries += 1


_SIFTED: Final = 4
_AT_ONCE: Final = 64
"""Of many whose time is over so many leave before others have their turn."""


class ExpiryClock:
    """Calls ``expire(entry_id)`` when an entry's time is over.

    It may be called for an entry that has left or is held by now: whoever is
    called looks again. ``present`` tells which ids are still worth a place here.
    """

    def __init__(
        self, expire: Callable[[str], None], present: Mapping[str, StoredEntry]
    ) -> None:
        self._expire = expire
        self._present = present
        self._due: list[tuple[float, str]] = []
        self._to_sift: list[tuple[float, str]] = []
        """What was due as it was too much; each add looks at some of these again."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0  # uvloop's handles do not all know when

    def add(self, at: float, entry_id: str) -> None:
        """Ask to be called at loop time ``at``."""
        heapq.heappush(self._due, (at, entry_id))
        if not self._to_sift and len(self._due) > 1024 + 2 * len(self._present):
            self._due, self._to_sift = self._to_sift, self._due
        for _ in range(min(_SIFTED, len(self._to_sift))):
            due = self._to_sift.pop()  # its last: it stays a heap
            if self._is_due(*due):
                heapq.heappush(self._due, due)
        if self._timer is None or at < self._timer_at:
            self._arm()

    def _is_due(self, at: float, entry_id: str) -> bool:
        """Is that the time of the entry that has the id now?"""
        entry = self._present.get(entry_id)
        return entry is not None and entry.expires_at == at

    def stop(self) -> None:
        """Forget everything."""
        self._due.clear()
        self._to_sift.clear()
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if heap := self._first():
            self._timer_at = heap[0][0]
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._timer_at, self._call)

    def _call(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for _ in range(_AT_ONCE):  # the others of many have the next tick
            heap = self._first()
            if not heap or heap[0][0] > now:
                break
            self._expire(heapq.heappop(heap)[1])
        self._arm()

    def _first(self) -> list[tuple[float, str]]:
        """Return the heap that what is due first is in."""
        if not self._due or (self._to_sift and self._to_sift[0] < self._due[0]):
            return self._to_sift
        return self._due


_MAX_COUNT = 65_536
_MAX_BYTES = _MAX_COUNT * 1024
_MAX_AGE_S = 600.0

_NBYTES = 512  # with its key, and its place in the order
_NBYTES_EACH = 72  # a token, or a consumer beside its name


class Tombstone(msgspec.Struct, frozen=True, gc=False):
    """How an entry left. ``reason`` is empty if by its last acknowledgement.

    ``tokens`` are those of the deliveries that counted. ``attempts`` is not 0 if
    it had been delivered when it left: sent again it goes on there, whatever it
    left by. Only what failed too often may fail as often again.
    """

    reason: str
    digest: bytes
    tokens: tuple[bytes, ...]
    left_at: float
    attempts: int = 0
    failures: int = 0
    consumers: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """About what it costs to remember it; an entry's id is 256 bytes at most."""
        nbytes = _NBYTES + _NBYTES_EACH * len(self.tokens)
        for consumer in self.consumers:
            nbytes += _NBYTES_EACH + len(consumer)
        return nbytes


class Tombstones:
    """Bounded by count, by bytes and by age, oldest forgotten first."""

    def __init__(
        self,
        max_count: int = _MAX_COUNT,
        max_age_s: float = _MAX_AGE_S,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self.nbytes = 0
        self._max_count = max_count
        self._max_age_s = max_age_s
        self._max_bytes = max_bytes
        self._by_id: collections.OrderedDict[str, Tombstone] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, entry_id: str, stone: Tombstone) -> None:
        """Remember that the entry left."""
        stones = self._by_id
        if (earlier := stones.pop(entry_id, None)) is not None:
            self.nbytes -= earlier.nbytes
        stones[entry_id] = stone
        self.nbytes += stone.nbytes
        while len(stones) > self._max_count or self.nbytes > self._max_bytes:
            self._forget_oldest()

    def find(self, entry_id: str, now: float) -> Tombstone | None:
        """Return how the entry left, unless that is forgotten or unknown."""
        for _ in range(_AT_ONCE):
            oldest = next(iter(self._by_id.values()), None)
            if oldest is None or now - oldest.left_at <= self._max_age_s:
                break
            self._forget_oldest()
        found = self._by_id.get(entry_id)
        if found is None or now - found.left_at > self._max_age_s:
            return None
        return found

    def _forget_oldest(self) -> None:
        _, stone = self._by_id.popitem(last=False)
        self.nbytes -= stone.nbytes


logger = logging.getLogger(__name__)

_NOBODY: Final[frozenset[str]] = frozenset()


class EntryTable:
    """The entries of a buffer by their ids, and what is remembered of others.

    ``memory`` is where their bytes lie. ``unlist`` is called with an entry that leaves:
    nobody selects it any more. ``changed`` whenever room or a state may have changed.
    """

    def __init__(
        self,
        memory: EntryMemory,
        counters: Counters,
        *,
        unlist: Callable[[StoredEntry], None],
        changed: Callable[[], None],
    ) -> None:
        self.entries: dict[str, StoredEntry] = {}
        self.memory = memory
        self.changed = changed
        self._counters = counters
        self._unlist = unlist
        self._seqs = itertools.count(1)
        self.tombstones = Tombstones()
        self._expiry = ExpiryClock(self._expire_id, self.entries)

    def admit(self, draft: Draft) -> StoredEntry:
        """Begin an entry.

        :raises EntryTooLarge: it could never fit
        :raises EntryConflict: the id is known
        """
        known = self.known_digest(draft.entry_id)
        if known is not None or draft.entry_id in self.entries:
            other = "" if draft.streaming else ", with other contents"
            raise EntryConflict(
                f"entry {draft.entry_id!r} is known already{other}",
                hint="use a new entry_id for new contents",
            )
        entry = StoredEntry(draft, next(self._seqs))
        self.memory.check_size(entry)
        self.entries[entry.entry_id] = entry
        return entry

    def resume(self, entry: StoredEntry, digest: bytes) -> None:
        """Let a new entry go on where an insert of the same contents broke off."""
        stone = self.tombstones.find(entry.entry_id, _now())
        if stone is None or not stone.attempts or stone.digest != digest:
            return
        entry.attempts, entry.failures = stone.attempts, stone.failures
        entry.acknowledged_tokens.extend(stone.tokens)
        entry.deliveries_left = max(1, entry.deliveries_left - len(stone.tokens))
        if entry.consumers is not None:
            entry.consumers.update(stone.consumers)

    def is_known(self, entry_id: str) -> bool:
        """Is an entry of that id here, or was one until it left lately?"""
        if entry_id in self.entries:
            return True
        return self.tombstones.find(entry_id, _now()) is not None

    def known_digest(self, entry_id: str) -> bytes | None:
        """Return the digest of a committed or acknowledged entry of that id."""
        entry = self.entries.get(entry_id)
        if entry is not None:
            return entry.digest() if entry.complete else None
        stone = self.tombstones.find(entry_id, _now())
        return stone.digest if stone is not None and not stone.reason else None

    def was_taken(self, entry_id: str) -> bool:
        """Has that entry left by its last acknowledgement, as far as is known?"""
        stone = self.tombstones.find(entry_id, _now())
        return stone is not None and not stone.reason

    def is_undecided(self, entry_id: str) -> bool:
        """Is an insert under that id under way, or ending?

        Also if all its bytes are in, but only in a consumer's hands: acknowledged it
        was inserted; given back it was not, or not yet.
        """
        entry = self.entries.get(entry_id)
        return entry is not None and not (entry.complete and entry.in_arena)

    def was_acknowledged(self, entry_id: str, token: bytes) -> bool:
        """Did that delivery count? Asked by a consumer whose link was cut."""
        entry = self.entries.get(entry_id)
        if entry is not None:
            return token in entry.acknowledged_tokens
        stone = self.tombstones.find(entry_id, _now())
        return stone is not None and token in stone.tokens

    def when_gone(self, entry_id: str) -> asyncio.Future[None]:
        """Return a future of the entry's end.

        :raises KeyError: the id is unknown
        :raises EntryAborted: it left already, by something else than an
            acknowledgement
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = self.entries.get(entry_id)
        if entry is not None:
            entry.gone.add(future)
            future.add_done_callback(entry.gone.discard)
            return future
        stone = self.tombstones.find(entry_id, _now())
        if stone is None:
            raise KeyError(f"no entry {entry_id!r} is here, or was in the last minutes")
        if stone.reason:
            raise EntryAborted(reason=stone.reason)
        future.set_result(None)
        return future

    def wait_again(self, entry: StoredEntry) -> None:
        """A direct delivery ended but the entry stays: back to its old place."""
        self.memory.free_outside(entry)
        entry.delivered_digest = entry.digest()
        entry.drop_regions()
        entry.begin_again()
        entry.state = EntryState.WAITING
        self.changed()

    def make_ready(self, entry: StoredEntry) -> None:
        """It is in, and its time begins to run."""
        entry.state = EntryState.READY
        self._counters.inserted += 1
        if entry.draft.ttl_s is not None:
            entry.expires_at = _now() + entry.draft.ttl_s
            self._expiry.add(entry.expires_at, entry.entry_id)

    def expire(self, entry: StoredEntry) -> bool:
        """Let a READY entry that nobody holds leave if its time is over."""
        over = entry.expires_at is not None and entry.expires_at <= _now()
        if entry.state is not EntryState.READY or entry.leases or not over:
            return False
        self._counters.expired += 1
        logger.info("entry %r was not taken in time and leaves", entry.entry_id)
        self.remove(entry, "ttl")
        return True

    def remove(self, entry: StoredEntry, reason: str) -> None:
        """The entry is gone; nobody holds it. An acknowledgement has no reason."""
        if not reason and entry.state is not EntryState.READY:
            self._counters.inserted += 1  # straight to its consumers
        entry.state = EntryState.GONE
        entry.left_by = reason
        self._unlist(entry)
        self.memory.free(entry)
        del self.entries[entry.entry_id]
        was_seen = entry.complete or entry.draft.streaming or entry.delivered_digest
        if was_seen or reason != "producer":
            self._remember(entry)  # others leave without a trace
        if entry.gone:
            _end_waits(entry)
        self.changed()

    def close(self) -> None:
        """Nothing more expires."""
        self._expiry.stop()

    def _remember(self, entry: StoredEntry) -> None:
        # Also what was in may be sent again: who inserted it may not know of it.
        goes_on = not entry.draft.streaming
        stone = Tombstone(
            entry.left_by,
            entry.digest() if entry.complete else entry.delivered_digest,
            tuple(entry.acknowledged_tokens),
            _now(),
            entry.attempts if goes_on else 0,
            entry.failures if entry.left_by != "max_deliver" else 0,
            frozenset(entry.consumers) if entry.consumers else _NOBODY,
        )
        self.tombstones.add(entry.entry_id, stone)

    def _expire_id(self, entry_id: str) -> None:
        entry = self.entries.get(entry_id)
        if entry is not None:
            self.expire(entry)


def _end_waits(entry: StoredEntry) -> None:
    for future in list(entry.gone):
        if future.done():
            continue
        if entry.left_by:
            future.set_exception(EntryAborted(reason=entry.left_by))
            future.exception()  # who waited may have been cancelled meanwhile
        else:
            future.set_result(None)


def _now() -> float:
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:  # the buffer is aborted where no loop runs
        return time.monotonic()  # which is what the time of loops is, too
