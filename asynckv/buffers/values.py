"""What a store buffer holds, for whoever asks for it: the store itself, or its peers.

A value is charged to the arena until it is no longer stored *and* nobody reads it. A
value is replaced whole: readers keep the one they began with. Puts wait for room first
come, first served; every other function is plain.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from asynckv.abc import PrefixMatch, StoredValue
from asynckv.buffers.eviction import EvictionOrder
from asynckv.buffers.lower_tiers import LowerTiers, Name, Owner
from asynckv.buffers.statistics import StoreCounters
from asynckv.errors import BufferClosed, EntryTooLarge
from asynckv.tensors.arena import Arena, Region
from asynckv.transfers.tokens import as_key
from asynckv.types import TensorSpec
from asynckv.waits.waiting import FairQueue, in_turns

__all__ = (
    "PendingPut",
    "PinnedValue",
    "StoredValues",
)

_HERE: Final = "memory"
_OWN: Final = "asynckv/"
"""With this begins what connectors say of themselves: it never leaves memory."""
_ASKED_AT_ONCE: Final = 512
_FETCHED_AT_ONCE: Final = 16
_HELD_A_TURN: Final = 64
_LET_GO_AT_ONCE: Final = 256
_EVICTED_AT_ONCE: Final = 128
_MAX_KEYS: Final = 2**20
"""Keys cost memory too, which the arena does not count: a bound for tiny values."""


@dataclasses.dataclass(slots=True, eq=False)
class PendingPut:
    """Memory for one value that is still to come: commit it, or discard it."""

    name: Name
    spec: TensorSpec
    region: Region
    is_open: bool = True


@dataclasses.dataclass(slots=True, eq=False)
class _StoredValue:
    name: Name
    spec: TensorSpec
    region: Region
    digest: bytes
    expires_at_s: float | None = None
    is_pinned: bool = False
    is_unread: bool = False
    readers: int = 0
    is_stored: bool = True


@dataclasses.dataclass(slots=True, eq=False)
class PinnedValue:
    """One reader's hold on a value: its memory stays as it is until released."""

    spec: TensorSpec
    region: Region
    digest: bytes
    _value: _StoredValue
    is_held: bool = True

    @property
    def expires_at_s(self) -> float | None:
        """When it is void, in seconds since 1970."""
        return self._value.expires_at_s


@dataclasses.dataclass(slots=True, eq=False)
class _Ticket:
    """One put's place in the line; ``pending`` is what it waited for.

    Through without it, it can never have any.
    """

    name: Name
    spec: TensorSpec
    pending: PendingPut | None = None


class StoredValues:
    """The values of one store buffer in ``arena``, by name.

    A name is a key, with the owner of the value. ``check_loop`` is called
    first by what only the store's own loop may do.
    """

    def __init__(
        self, arena: Arena, check_loop: Callable[[], object], max_keys: int = _MAX_KEYS
    ) -> None:
        self.counters = StoreCounters()
        self.closed = False
        self.lower: LowerTiers | None = None
        self.room: FairQueue[_Ticket] = FairQueue(self._is_through)
        self._arena = arena
        self._check_loop = check_loop
        self._max_keys = max_keys
        self._values: dict[Owner, dict[str, _StoredValue]] = {}
        self._count = 0
        self._idle: EvictionOrder[_StoredValue] = EvictionOrder()
        self.is_evicting = False
        """Has so much been dropped in this turn of the loop that others have theirs?"""
        self._let_go: list[list[PinnedValue | None]] = []
        """Holds that have ended, and are released step by step."""
        self._swept: list[dict[str, _StoredValue]] = []
        """What nobody finds any more; its memory is given back step by step."""

    def __len__(self) -> int:
        return self._count

    async def reserve(self, key: str, spec: TensorSpec, owner: Owner) -> PendingPut:
        """Take memory for a value to be written there, then committed.

        Waits, last in line, only while readers and other puts hold too much, and for
        a turn of the loop each time that many keys were dropped to make room. They are
        the only trace that a cancelled call leaves.

        :raises EntryTooLarge: it could never fit, or since memory was refused
        :raises BufferClosed: the buffer is closed, or was closed meanwhile
        """
        pending = self.reserve_nowait(key, spec, owner)
        if pending is not None:
            return pending
        ticket = _Ticket((key, owner), spec)
        needs_others = not (self.is_evicting or self._is_growing_for(spec))
        self.counters.room_waits += needs_others
        who = f"put of {key!r} ({spec.nbytes} bytes)"
        try:
            self.room.join(ticket)
            what, ends = "room", "the end of a get or put, or aclose"
            if self._count >= self._max_keys:
                what = f"one of {self._max_keys} keys, all of them in use or pinned"
                ends = "a delete, the end of a get or pin, or aclose"
            await self.room.until_through(ticket, who, what, ends)
            if self.closed:
                raise BufferClosed("the buffer was closed while the put waited")
        except BaseException:
            if not self.room.quit(ticket) and ticket.pending is not None:
                self.discard(ticket.pending)
            raise
        if ticket.pending is None:
            raise EntryTooLarge(nbytes=spec.nbytes, max_bytes=self._arena.max_bytes)
        return ticket.pending

    def reserve_nowait(
        self, key: str, spec: TensorSpec, owner: Owner
    ) -> PendingPut | None:
        """As :meth:`reserve`; ``None`` where that would wait."""
        self.check_usable(key)
        if not self._arena.could_ever_fit([spec.nbytes]):
            raise EntryTooLarge(nbytes=spec.nbytes, max_bytes=self._arena.max_bytes)
        return None if self.room else self._reserve((key, owner), spec)

    def commit(
        self,
        pending: PendingPut,
        digest: bytes,
        *,
        expires_at_s: float | None = None,
        is_pinned: bool = False,
        is_fetched: bool = False,
    ) -> None:
        """Replace what is stored by that name with what was written.

        It is void from ``expires_at_s`` on, in seconds since 1970. ``is_pinned``: it is
        never dropped for room. ``is_fetched``: it came from a lower tier, where it is.

        :raises BufferClosed: the buffer was closed meanwhile; it is discarded
        :raises RuntimeError: it was committed or discarded before
        """
        if not pending.is_open:
            raise RuntimeError("this put was committed or discarded before")
        if self.closed:
            self.discard(pending)
            raise BufferClosed("the buffer was closed while the value came in")
        pending.is_open = False
        name = pending.name
        self._remove(name)
        while self._count >= self._max_keys:
            victim = self._idle.victim()
            if victim is None:
                break
            self._evict(victim)
        value = _StoredValue(
            *(name, pending.spec, pending.region, digest, expires_at_s, is_pinned),
            is_unread=is_fetched,
        )
        key, owner = name
        self._values.setdefault(owner, {})[key] = value
        self._count += 1
        self._now_idle(value)
        self.counters.puts += not is_fetched
        if self.lower is not None and not (is_fetched or name[0].startswith(_OWN)):
            self.lower.stored(name)
        self.room.change()

    def discard(self, pending: PendingPut) -> None:
        """Give the memory of a put back; nothing happens after a commit."""
        if pending.is_open:
            pending.is_open = False
            pending.region.release()
            self.room.change()

    def lookup(self, key: str, owner: Owner) -> PinnedValue | None:
        """Hold what is stored under ``key``, if anything, until it is released."""
        (pinned,) = self.hold([key], owner)
        if pinned is None:
            self.counters.misses += 1
        else:
            self.counters.hits += 1
            pinned._value.is_unread = False
        return pinned

    def hold(
        self, keys: Sequence[str], owner: Owner, *, is_prefix: bool = False
    ) -> list[PinnedValue | None]:
        """As :meth:`lookup`, for each of ``keys``; no hit or miss of what is there.

        Of a prefix none is held after the first one that is not there.
        """
        self._check_open()
        values = self._values.get(owner, {})
        held: list[PinnedValue | None] = []
        for key in keys:
            value = values.get(key)
            held.append(None if value is None else self._hold(value))
            if is_prefix and held[-1] is None:
                held += [None] * (len(keys) - len(held))
                break
        if self.lower is not None:
            found = zip(keys, held, strict=True)
            self.lower.used([key for key, one in found if one is not None], owner)
        return held

    async def fetch_and_hold(
        self,
        keys: Sequence[str],
        owner: Owner,
        *,
        within_s: float | None = None,
        is_prefix: bool = False,
    ) -> list[PinnedValue | None]:
        """As :meth:`hold`, once what lower tiers have of ``keys`` is in memory.

        The first ones come first, as far as there is room, and for ``within_s`` at
        most. A cancelled call holds none.
        """
        held: list[PinnedValue | None] = []
        until_s = None if within_s is None else time.monotonic() + within_s
        try:
            for start in range(0, len(keys), _FETCHED_AT_ONCE):
                if is_prefix and held and held[-1] is None:
                    return held + [None] * (len(keys) - start)
                if start and not start % _HELD_A_TURN:
                    await asyncio.sleep(0)  # others have their turn
                some = keys[start : start + _FETCHED_AT_ONCE]
                here = self.hold(some, owner, is_prefix=True)
                if here[-1] is not None:
                    held += here
                    continue
                held += here[: here.index(None)]
                some = some[len(held) - start :]
                left_s = None if until_s is None else until_s - time.monotonic()
                if left_s is None or left_s > 0:
                    await self.fetch(some, owner, within_s=left_s)
                # Now, or the next ones would drop them.
                held += self.hold(some, owner, is_prefix=is_prefix)
        except BaseException:
            self.release_all(held)
            raise
        return held

    def release_all(self, held: Sequence[PinnedValue | None]) -> None:
        """End the holds on all that there are: on some now, and on others in turns."""
        self._let_go.append([*reversed(held)])
        in_turns(self._sweep())

    def _release_one(self, pinned: PinnedValue) -> None:
        pinned.is_held = False
        value = pinned._value
        value.readers -= 1
        if value.readers:
            return
        if value.is_stored:
            # What was fetched for somebody who has not read it is the first to go.
            self._now_idle(value, is_used=not value.is_unread)
        else:
            value.region.release()

    def hold_name(self, name: Name) -> PinnedValue | None:
        """As :meth:`hold`, and that is no use of it."""
        value = self._find(name)
        return None if value is None else self._hold(value)

    def has_name(self, name: Name) -> bool:
        """Is a value stored under ``name``?"""
        return self._live(name) is not None

    def release(self, pinned: PinnedValue) -> None:
        """End one reader's hold; a second call does nothing."""
        if pinned.is_held:
            self._release_one(pinned)
        self.room.change()

    def remove(self, key: str, owner: Owner) -> bool:
        """Forget ``key``; ``True`` if it was there."""
        self._check_open()
        if self.lower is not None and not key.startswith(_OWN):
            self.lower.deleted((key, owner))
        if not self._remove((key, owner)):
            return False
        self.counters.deletes += 1
        self.room.change()
        return True

    async def delete(self, key: str, owner: Owner) -> bool:
        """As :meth:`remove`, and say of what a lower tier has, too, if it was there.

        If cancelled, it has or has not.
        """
        is_lower = False
        if self.lower is not None and not all(self.has([key], owner)):
            [tiers] = await self.lower.where([key], owner)
            is_lower = bool(tiers)
        return self.remove(key, owner) or is_lower

    def clear(self, owner: Owner) -> int:
        """Forget all that is the owner's; return how many values of it there were.

        Whatever is on its way from lower tiers is void, too. What nobody reads gives
        its memory back in this turn of the loop and the next ones. Never waits.
        """
        self._check_open()
        if self.lower is not None:
            self.lower.cleared(owner)
        values = self._values.pop(owner, {})
        count = len(values)
        self._count -= count
        self.counters.deletes += count
        self._swept.append(values)
        if len(self._swept) == 1:
            in_turns(self._sweep())
        return count

    def has(self, keys: Sequence[str], owner: Owner) -> tuple[bool, ...]:
        """Tell of each key if its ``owner`` has it."""
        self._check_open()
        values = self._values.get(owner, {})
        return tuple([key in values and self._is_valid(values[key]) for key in keys])

    async def nearest(self, keys: Sequence[str], owner: Owner) -> list[str | None]:
        """Tell of each key where it is: in ``"memory"``, in which tier, or nowhere.

        Of many keys not all are asked in one turn of the loop. A cancelled call leaves
        no trace.
        """
        self._check_open()
        nearest: list[str | None] = []
        for start in range(0, len(keys), _ASKED_AT_ONCE):
            if start:
                await asyncio.sleep(0)  # others have their turn
            some = keys[start : start + _ASKED_AT_ONCE]
            nearest += await self._nearest(some, owner)
        return nearest

    async def _nearest(self, keys: Sequence[str], owner: Owner) -> list[str | None]:
        here = self.has(keys, owner)
        nearest = [_HERE if has else None for has in here]
        if self.lower is None or all(here):
            return nearest
        missing = [index for index, has in enumerate(here) if not has]
        found = await self.lower.where([keys[index] for index in missing], owner)
        for index, tiers in zip(missing, found, strict=True):
            nearest[index] = tiers[0] if tiers else None
        return nearest

    async def match_prefix(self, keys: Sequence[str], owner: Owner) -> PrefixMatch:
        """Return how many are there from the first one on, which are to be used soon.

        A cancelled call leaves no trace.
        """
        nearest = await self.nearest(keys, owner)
        match = PrefixMatch(nearest)
        far = [
            number for number in range(match.ready, match) if nearest[number] != _HERE
        ]
        if far and self.lower is not None:
            await self.lower.touch([keys[number] for number in far], owner)
        return match

    async def stat(self, key: str, owner: Owner) -> StoredValue | None:
        """Say what there is of ``key``.  A cancelled call leaves no trace."""
        self.check_usable(key)
        tiers: Sequence[str] = ()
        if self.lower is not None:
            [tiers] = await self.lower.where([key], owner)
        value = self._live((key, owner))
        if value is None:
            return StoredValue(tuple(tiers)) if tiers else None
        until_s = value.expires_at_s
        return StoredValue(
            tiers=(_HERE, *tiers),
            spec=value.spec,
            ttl_s=None if until_s is None else max(until_s - time.time(), 0.001),
            is_pinned=value.is_pinned,
        )

    async def fetch(
        self, keys: Sequence[str], owner: Owner, *, within_s: float | None = None
    ) -> None:
        """Fetch into memory what of ``keys`` lower tiers have, and it has not.

        What takes longer than ``within_s`` is left. A cancelled call leaves no trace.
        """
        self._check_open()
        if self.lower is None:
            return
        missing = [
            key
            for key in keys
            if self._live((key, owner)) is None and not key.startswith(_OWN)
        ]
        if missing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self.lower.fetch(missing, owner)

    def close(self) -> None:
        """Forget everything; what is being read goes when its readers go.

        What nobody reads gives its memory back as after :meth:`clear`. Never waits.
        """
        self.closed = True
        self._swept += self._values.values()
        self._values = {}
        self._count = 0
        in_turns(self._sweep())
        self.room.change()

    async def aclose(self) -> None:
        """Wait, once it is closed, until all that nobody reads has gone."""
        for _ in self._sweep():
            await asyncio.sleep(0)

    def check_usable(self, key: str) -> None:
        """Refuse what is no key, another loop, and any call after the end."""
        as_key(key)
        self._check_open()

    def _check_open(self) -> None:
        self._check_loop()
        if self.closed:
            raise BufferClosed("the buffer is closed")

    def _is_growing_for(self, spec: TensorSpec) -> bool:
        """Whether it waits for nobody, but for memory that the system is asked for."""
        return self._arena.is_growing and spec.nbytes <= self._arena.free_bytes

    def _reserve(self, name: Name, spec: TensorSpec) -> PendingPut | None:
        """Take memory for a value, dropping what was used least recently.

        The value that is stored as ``name`` now goes last. ``None``, and nothing
        dropped, if too much of the arena is being read or written, or there are too
        many keys of which none may go. ``None`` also if the arena is about to grow: no
        more is dropped then than its bound asks for; or if enough was dropped for this
        turn of the loop: the next one goes on with who is first in line.
        """
        if self.is_evicting:
            return None
        old = self._find(name)
        if old is None and self._count >= self._max_keys and not self._idle:
            return None
        droppable = self._idle.nbytes
        if old is not None and old.is_pinned and not old.readers:
            droppable += old.region.nbytes  # by nobody but its successor
        if spec.nbytes > self._arena.free_bytes + droppable:
            return None
        for _ in range(_EVICTED_AT_ONCE):
            regions = self._arena.allocate([spec.nbytes])
            if regions is not None:
                return PendingPut(name, spec, regions[0])
            if self._is_growing_for(spec):
                return None
            victim = self._idle.victim(spare=old)
            if victim is None and droppable and self._idle.nbytes < droppable:
                victim, droppable = old, 0
            if victim is None:
                return None
            self._evict(victim)
        asyncio.get_running_loop().call_soon(self._evict_more)
        self.is_evicting = True
        return None

    def _evict_more(self) -> None:
        self.is_evicting = False
        self.room.change()

    def _is_through(self, ticket: _Ticket) -> bool:
        if self.closed:
            return True
        ticket.pending = self._reserve(ticket.name, ticket.spec)
        could_fit = self._arena.could_ever_fit([ticket.spec.nbytes])
        return ticket.pending is not None or not could_fit

    def _live(self, name: Name) -> _StoredValue | None:
        value = self._find(name)
        return value if value is not None and self._is_valid(value) else None

    def _is_valid(self, value: _StoredValue) -> bool:
        """``False``: its time is over, and it is not there any more."""
        if value.expires_at_s is None or time.time() < value.expires_at_s:
            return True
        self._remove(value.name)
        self.counters.expired += 1
        if self.lower is not None:
            self.lower.deleted(value.name)
        return False

    def _now_idle(self, value: _StoredValue, *, is_used: bool = True) -> None:
        if not value.is_pinned:
            self._idle.add(value, value.region.nbytes, is_used=is_used)

    def _hold(self, value: _StoredValue) -> PinnedValue | None:
        if not self._is_valid(value):
            return None
        value.readers += 1
        self._idle.discard(value)
        return PinnedValue(value.spec, value.region, value.digest, value)

    def _evict(self, value: _StoredValue) -> None:
        if self._find(value.name) is value:
            self._remove(value.name)
            self.counters.evictions += 1
        else:  # it is to be swept
            self._drop(value)

    def _find(self, name: Name) -> _StoredValue | None:
        key, owner = name
        values = self._values.get(owner)
        return None if values is None else values.get(key)

    def _remove(self, name: Name) -> bool:
        key, owner = name
        values = self._values.get(owner, {})
        value = values.pop(key, None)
        if value is None:
            return False
        if not values:
            del self._values[owner]
        self._count -= 1
        self._drop(value)
        return True

    def _drop(self, value: _StoredValue) -> None:
        """Give the memory of a value back, unless it is read. Again is nothing."""
        if not value.is_stored:
            return
        self._idle.discard(value)
        value.is_stored = False
        if not value.readers:
            value.region.release()

    def _sweep(self) -> Iterator[None]:
        """Give back, step by step: first holds, then what nobody finds any more."""
        while self._let_go or self._swept:
            if self._let_go:
                held = self._let_go[-1]
                for _ in range(min(len(held), _LET_GO_AT_ONCE)):
                    pinned = held.pop()
                    if pinned is not None and pinned.is_held:
                        self._release_one(pinned)
                if not held:
                    self._let_go.pop()
            else:
                values = self._swept[-1]
                for _ in range(min(len(values), _LET_GO_AT_ONCE)):
                    self._drop(values.popitem()[1])
                if not values:
                    self._swept.pop()
            self.room.change()
            yield
