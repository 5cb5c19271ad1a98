"""The changes of keys that one tier is still to be told, and what is void meanwhile.

Without I/O: whoever carries the changes to the tier says what came of each. Every
change of a key has an epoch, later ones a higher one. Of each key one change is under
way at a time: the last one is the last to arrive, however long an earlier one took.

A tier that was not told of a change may hold an older value of that key: one of an
earlier epoch is void then. That is kept as long as it is so, of so many keys. Of a key
that is forgotten the epoch alone is kept, in a table in which few keys share a place:
what is older is void, of these keys too.
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, NamedTuple, TypeVar

__all__ = ("TierChange", "ValidFrom", "WriteBehind")

T = TypeVar("T")

_MAX_KEYS: Final = 65_536
_PLACES: Final = 2**20
_MAX_EPOCH: Final = 2**64 - 1


@dataclasses.dataclass(slots=True, eq=False)
class TierChange(Generic[T]):
    """One change of a key: ``value`` is to be written, or, if ``None``, deleted."""

    key: str
    epoch: int
    value: T | None = None
    nbytes: int = 0
    is_delete: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.is_delete = self.value is None


class ValidFrom(NamedTuple):
    """Values of a key from ``epoch`` on, and those with the very same bytes."""

    epoch: int
    identity: Hashable

    def has(self, epoch: int, identity: Hashable) -> bool:
        """Is this one of them?"""
        is_same = self.identity is not None and self.identity == identity
        return is_same or epoch >= self.epoch


@dataclasses.dataclass(slots=True, eq=False)
class _Key(Generic[T]):
    """The last change of a key, and what of that and earlier ones is on its way."""

    epoch: int
    identity: Hashable
    queued: TierChange[T] | None = None
    running: TierChange[T] | None = None
    is_in_doubt: bool = False
    """Something older may still arrive at the tier, after what was made since."""
    is_made: bool = False
    """The tier was told of the last change."""


class WriteBehind(Generic[T]):
    """The changes for one tier.

    At most ``max_bytes`` of values wait or are under way; what comes then is dropped.
    ``release`` is called once with each value, when this needs it no more. With
    ``deletes_old`` what could not be written is deleted, so that nothing older is found
    there by the next process: for a tier that no other one uses meanwhile.
    """

    def __init__(
        self,
        max_bytes: int,
        release: Callable[[T], None],
        *,
        deletes_old: bool = False,
        max_keys: int = _MAX_KEYS,
    ) -> None:
        self.accepted = self.dropped = self.failed = 0
        """How many writes the tier has taken, had no room here, came to nothing."""
        self.nbytes = 0
        """Of the values that wait or are under way."""
        self._max_bytes = max_bytes
        self._max_keys = max_keys
        self._release = release
        self.deletes_old = deletes_old
        # Its 8 MiB take memory as they are written to.
        self._forgotten = memoryview(mmap.mmap(-1, 8 * _PLACES)).cast("Q")
        self._keys: dict[str, _Key[T]] = {}
        # Each key of those is in one of these, or running.
        self._queued: OrderedDict[str, TierChange[T]] = OrderedDict()
        self._unsure: OrderedDict[str, None] = OrderedDict()
        self._undeleted: OrderedDict[str, None] = OrderedDict()
        self._running: set[TierChange[T]] = set()

    def __len__(self) -> int:
        """How many changes wait, or are under way."""
        return len(self._queued) + len(self._running)

    @property
    def is_full(self) -> bool:
        """Is there room for hardly any more?"""
        return self.nbytes > self._max_bytes // 2

    def is_behind(self, epoch: float) -> bool:
        """Does a change of ``epoch``, or an earlier one, wait or run?"""
        first = next(iter(self._queued.values()), None)
        changes = self._running if first is None else {first, *self._running}
        return any(change.epoch <= epoch for change in changes)

    @property
    def known_keys(self) -> int:
        """Of how many keys it is known that something older would be void."""
        return len(self._keys)

    def write(
        self, key: str, epoch: int, value: T, nbytes: int, identity: Hashable
    ) -> bool:
        """``value`` is to be written. ``False``: there is no room, it is dropped."""
        others = self._nbytes_without(key)
        if others and others + nbytes > self._max_bytes:
            self.skip(key, epoch, identity)
            self._release(value)
            return False
        state = self._change(key, epoch, identity)
        self.nbytes += nbytes
        self._queue(state, TierChange(key, epoch, value, nbytes))
        return True

    def skip(self, key: str, epoch: int, identity: Hashable) -> None:
        """A value is dropped; the key has changed all the same."""
        self.dropped += 1
        self.note(key, epoch, identity)

    def note(self, key: str, epoch: int, identity: Hashable) -> None:
        """The key has a value that is not to be written, or not yet."""
        self._leave_old(key, self._change(key, epoch, identity))

    def drop_writes(self) -> None:
        """What waits to be written is not to be written any more."""
        for key, change in list(self._queued.items()):
            if not change.is_delete:
                self._unqueue(key)
                self._leave_old(key, self._keys[key])

    def delete(self, key: str, epoch: int) -> None:
        """The key is to be deleted."""
        self._queue(self._change(key, epoch, None), TierChange(key, epoch))

    def take(self, max_changes: int, max_bytes: int) -> list[TierChange[T]]:
        """Begin changes, the oldest first: all of them writes, or all deletes.

        Of writes no more than ``max_bytes``, but for one. Each ends by :meth:`ended`.
        """
        taken: list[TierChange[T]] = []
        nbytes = 0
        for change in itertools.islice(self._queued.values(), 4 * max_changes):
            if self._keys[change.key].running is not None:
                continue
            if taken and change.is_delete != taken[0].is_delete:
                continue
            nbytes += change.nbytes
            if taken and (nbytes > max_bytes or len(taken) == max_changes):
                break
            taken.append(change)
        for change in taken:
            state = self._keys[change.key]
            state.queued, state.running = None, change
            del self._queued[change.key]
            self._running.add(change)
        return taken

    def ended(self, change: TierChange[T], *, is_done: bool) -> None:
        """A change is made, or came to nothing, and nothing is under way of it."""
        key, state = change.key, self._keys[change.key]
        state.running = None
        self._running.discard(change)
        if not change.is_delete:
            self.accepted += is_done
            self.failed += not is_done
            self._let_go(change)
        if not (is_done or change.is_delete or self.deletes_old):
            state.is_in_doubt = True  # what was not answered may be written yet
        if state.queued is not None:
            return
        if is_done and (change.is_delete or state.epoch == change.epoch):
            if not state.is_in_doubt:
                del self._keys[key]  # it has this value, or none
                return
            state.is_made = True
            self._unsure[key] = None
            self._bound()
        elif change.is_delete:
            self._undeleted[key] = None
            self._bound()
        else:
            self._leave_old(key, state)

    def retry(self, most: int = 256) -> None:
        """The tier answers again: what it has not deleted is to be deleted now."""
        for key in list(itertools.islice(self._undeleted, most)):
            del self._undeleted[key]
            state = self._keys[key]
            self._queue(state, TierChange(key, state.epoch))

    def valid_from(self, key: str) -> ValidFrom:
        """Return what of ``key`` is as new as it should be, if it is read from now on.

        What is read meanwhile may be of before a change that is known no more when it
        has been read: so ask before that, too.
        """
        oldest_epoch = self._forgotten[hash(key) % _PLACES]
        state = self._keys.get(key)
        if state is None:
            return ValidFrom(oldest_epoch, None)
        return ValidFrom(max(state.epoch, oldest_epoch), state.identity)

    def is_valid(self, key: str, epoch: int, identity: Hashable) -> bool:
        """Is a value that the tier has of ``key`` as new as it should be?"""
        return self.valid_from(key).has(epoch, identity)

    def is_sure(self, key: str) -> bool:
        """Is nothing known by which what the tier has of ``key`` may be too old?"""
        return key not in self._keys

    def may_be_new(self, key: str) -> bool:
        """Was the tier told of the last change, as far as is known?"""
        state = self._keys.get(key)
        return state is None or (state.is_made and state.identity is not None)

    def close(self) -> None:
        """Nothing more is to be written. What is under way ends as ever."""
        while self._queued:
            self._unqueue(next(iter(self._queued)))

    def _change(self, key: str, epoch: int, identity: Hashable) -> _Key[T]:
        """Note the last change of a key. What waited of it is void."""
        self._unqueue(key)
        self._unsure.pop(key, None)
        self._undeleted.pop(key, None)
        state = self._keys.get(key)
        if state is None:
            state = self._keys[key] = _Key(epoch, identity)
        state.epoch, state.identity, state.is_made = epoch, identity, False
        return state

    def _queue(self, state: _Key[T], change: TierChange[T]) -> None:
        state.queued = self._queued[change.key] = change
        self._bound()

    def _nbytes_without(self, key: str) -> int:
        queued = self._queued.get(key)
        return self.nbytes - (0 if queued is None else queued.nbytes)

    def _unqueue(self, key: str) -> None:
        change = self._queued.pop(key, None)
        if change is None:
            return
        self._keys[key].queued = None
        if not change.is_delete:
            self.dropped += 1
            self._let_go(change)

    def _let_go(self, change: TierChange[T]) -> None:
        value, change.value = change.value, None
        self.nbytes -= change.nbytes
        if value is not None:
            self._release(value)

    def _leave_old(self, key: str, state: _Key[T]) -> None:
        """The last change of ``key`` was not made: what is there may be older."""
        if self.deletes_old:
            self._queue(state, TierChange(key, state.epoch))
        elif state.running is None:  # else it is looked at when that ends
            self._unsure[key] = None
            self._bound()

    def _bound(self) -> None:
        """Know of no more keys than may be. What is known longest is forgotten."""
        while len(self._keys) > self._max_keys:
            for known in (self._undeleted, self._unsure, self._queued):
                if known:
                    break
            else:
                return  # all are under way
            self._forget(next(iter(known)))

    def _forget(self, key: str) -> None:
        state = self._keys[key]
        place = hash(key) % _PLACES
        epoch = min(state.epoch, _MAX_EPOCH)
        self._forgotten[place] = max(self._forgotten[place], epoch)
        self._unqueue(key)
        self._unsure.pop(key, None)
        self._undeleted.pop(key, None)
        if state.running is None:
            del self._keys[key]
