"""The changes of keys that one tier is still to be told, and what is void meanwhile.

Without I/O: whoever carries the changes to the tier says what came of each. Every
change of a key has an epoch, later ones a higher one. Of each key one change is under
way at a time: the last one is the last to arrive, however long an earlier one took.

A tier that was not told of a change may hold an older value of that key: one of an
earlier epoch is void then. That is kept as long as it is so, of so many keys. Of a key
that is forgotten the epoch alone is kept, in a table in which few keys share a place:
what is older is void, of these keys too.

Keys whose names begin alike, up to the last ``/``, can be cleared together
(:mod:`~asynckv.stores.clearings`). What is changed after that waits until it has ended,
in a line of its own, so that others go on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from asynckv.stores.clearings import Clearings, LastEpochs, TierClearing

__all__ = ("TierChange", "ValidFrom", "WriteBehind")

T = TypeVar("T")

_MAX_KEYS: Final = 65_536
_AT_ONCE: Final = 256


@dataclasses.dataclass(slots=True, eq=False)
class TierChange(Generic[T]):
    """One change of a key: ``value`` is to be written, or the key deleted."""

    key: str
    epoch: int
    value: T | None = None
    nbytes: int = 0
    is_delete: bool = True
    is_late: bool = False
    """Nobody waits for its call, which may never end: no clearing does, either."""


_Line: TypeAlias = "OrderedDict[str, TierChange[T]]"


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
    line: _Line[T] | None = None
    """In which that change waits, if it does."""
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
        self.deletes_old = deletes_old
        self.clearings = Clearings()
        self._max_bytes = max_bytes
        self._max_keys = max_keys
        self._release = release
        self._forgotten = LastEpochs()
        """Of keys: what is older is void."""
        self._unseen: list[str] = []
        """Keys that are still to be looked at: is what is known of them cleared?"""
        self._keys: dict[str, _Key[T]] = {}
        # Each key of those is in one of these, or running.
        self._queued: _Line[T] = OrderedDict()
        self._queued_after: dict[str, _Line[T]] = {}
        """By prefix: what has come since that was to be cleared."""
        self._unsure: OrderedDict[str, None] = OrderedDict()
        self._undeleted: OrderedDict[str, None] = OrderedDict()
        self._running: dict[str, TierChange[T]] = {}
        self._writes: dict[str, None] = {}
        """Keys of which a write waits: they are found among ever so many deletes."""

    def __len__(self) -> int:
        """How many changes wait, or are under way."""
        waiting = sum(map(len, self._lines())) + len(self.clearings.pending_epochs())
        return waiting + len(self._running)

    @property
    def is_full(self) -> bool:
        """Is there room for hardly any more?"""
        return self.nbytes > self._max_bytes // 2

    def is_behind(self, epoch: float) -> bool:
        """Does a change of ``epoch``, or an earlier one, wait or run?

        But for one that is late, or waits for such a one: that may be so for ever.
        """
        late = {key for key, change in self._running.items() if change.is_late}
        epochs = [one.epoch for key, one in self._running.items() if key not in late]
        for line in self._lines():
            others = (one.epoch for key, one in line.items() if key not in late)
            epochs += itertools.islice(others, 1)
        epochs += self.clearings.pending_epochs()
        return any(one <= epoch for one in epochs)

    @property
    def known_keys(self) -> int:
        """Of how many keys it is known that something older would be void."""
        return len(self._keys)

    def write(
        self, key: str, epoch: int, value: T, nbytes: int, identity: Hashable
    ) -> bool:
        """``value`` is to be written. ``False``: there is no room, it is dropped."""
        state = self._change(key, epoch, identity)
        waits = self.clearings.pending_epoch(_prefix_of(key)) is not None
        # What has to wait leaves room to those that go on.
        most = self._max_bytes // 2 if waits else self._max_bytes
        if self.nbytes and self.nbytes + nbytes > most:
            self.dropped += 1
            self._leave_old(key, state)
            self._release(value)
            return False
        self.nbytes += nbytes
        self._writes[key] = None
        self._queue(state, TierChange(key, epoch, value, nbytes, is_delete=False))
        return True

    def skip(self, key: str, epoch: int, identity: Hashable) -> None:
        """A value is dropped; the key has changed all the same."""
        self.dropped += 1
        self.note(key, epoch, identity)

    def note(self, key: str, epoch: int, identity: Hashable) -> None:
        """The key has a value that is not to be written, or not yet."""
        self._leave_old(key, self._change(key, epoch, identity))

    def drop_writes(self, most: int = _AT_ONCE) -> bool:
        """Some of what waits is not to be written any more. Is there more of it?"""
        for key in list(itertools.islice(self._writes, most)):
            self._withdraw(key)
            self._leave_old(key, self._keys[key])
        return bool(self._writes)

    def delete(self, key: str, epoch: int) -> None:
        """The key is to be deleted."""
        self._queue(self._change(key, epoch, None), TierChange(key, epoch))

    def forget_cleared(self) -> bool:
        """Let go of some of what was cleared; ``False``: there is nothing of it."""
        if not self._unseen:
            if not self.clearings.begin_forgetting():
                return False
            self._unseen = list(self._keys)
        for key in self._unseen[-_AT_ONCE:]:
            state = self._keys.get(key)
            cleared = self.clearings.pending_epoch(_prefix_of(key))
            if state is None or cleared is None or state.epoch >= cleared:
                continue
            if key not in self._running and not state.is_in_doubt:
                self._drop(key)
                continue
            self._change(key, cleared, None)
            if key not in self._running:
                self._unsure[key] = None
        del self._unseen[-_AT_ONCE:]
        if not self._unseen:
            self.clearings.forgotten()
        return True

    def take_clearing(self) -> TierClearing | None:
        """Begin a clearing, if one can begin now. The clearings are told of its end."""
        running = self._running.values()
        busy = {_prefix_of(change.key) for change in running if not change.is_late}
        return self.clearings.take(busy)

    def take(self, max_changes: int, max_bytes: int) -> list[TierChange[T]]:
        """Begin changes, the oldest first: all of them writes, or all deletes.

        Of writes no more than ``max_bytes``, but for one. Each ends by :meth:`ended`.
        """
        after = {name: line for name, line in self._queued_after.items() if line}
        self._queued_after = after
        pending = self.clearings.pending_epoch
        ready = [line for name, line in after.items() if pending(name) is None]
        for line in sorted(filter(None, [self._queued, *ready]), key=_epoch_of_first):
            taken = self._first_of(line, max_changes, max_bytes)
            for change in taken:
                self._unqueue(change.key)
                self._running[change.key] = change
            if taken:
                return taken
        return []

    def _first_of(
        self, line: _Line[T], max_changes: int, max_bytes: int
    ) -> list[TierChange[T]]:
        first: list[TierChange[T]] = []
        nbytes = 0
        most = 4 * max_changes + len(self._running)
        for change in itertools.islice(line.values(), most):
            is_other = first and change.is_delete != first[0].is_delete
            if is_other or change.key in self._running:
                continue
            nbytes += change.nbytes
            if first and (nbytes > max_bytes or len(first) == max_changes):
                break
            first.append(change)
        return first

    def ended(self, change: TierChange[T], *, is_done: bool) -> None:
        """A change is made, or came to nothing, and nothing is under way of it."""
        key, state = change.key, self._keys[change.key]
        del self._running[key]
        if not change.is_delete:
            self.accepted += is_done
            self.failed += not is_done
            self._let_go(change)
        if not (is_done or change.is_delete or self.deletes_old):
            state.is_in_doubt = True  # what was not answered may be written yet
        if state.line is not None:
            return
        prefix = _prefix_of(key)
        cleared = self.clearings.pending_epoch(prefix)
        if cleared is not None and state.epoch <= cleared:
            if not (state.is_in_doubt or change.is_late):
                del self._keys[key]  # it will be cleared
                return
        if is_done and (change.is_delete or state.epoch == change.epoch):
            is_known = change.is_delete or self.clearings.may_have(prefix)
            if is_known and not state.is_in_doubt:
                del self._keys[key]  # it has this value, or none
                return
            state.is_made = True
            self._keep(key, self._unsure)
        elif change.is_delete:
            self._keep(key, self._undeleted)
        else:
            self._leave_old(key, state)

    def retry(self) -> bool:
        """What the tier has not deleted is to be deleted now. Is there more of it?"""
        for key in list(itertools.islice(self._undeleted, _AT_ONCE)):
            del self._undeleted[key]
            state = self._keys[key]
            self._queue(state, TierChange(key, state.epoch))
        return bool(self._undeleted)

    def valid_from(self, key: str) -> ValidFrom:
        """Return what of ``key`` is as new as it should be, if it is read from now on.

        What is read meanwhile may be of before a change that is known no more when it
        has been read: so ask before that, too.
        """
        void_epoch = self.clearings.void.of(_prefix_of(key))
        oldest_epoch = max(self._forgotten.of(key), void_epoch)
        state = self._keys.get(key)
        if state is None or state.epoch < void_epoch:
            return ValidFrom(oldest_epoch, None)
        return ValidFrom(max(state.epoch, oldest_epoch), state.identity)

    def is_sure(self, key: str) -> bool:
        """Is nothing known by which what the tier has of ``key`` may be too old?"""
        return key not in self._keys

    def may_be_new(self, key: str) -> bool:
        """Was the tier told of the last change, as far as is known?"""
        state = self._keys.get(key)
        if state is None and self.clearings.is_unused:
            return True  # of thousands this is asked
        prefix = _prefix_of(key)
        if state is None or state.epoch < self.clearings.void.of(prefix):
            return self.clearings.may_have(prefix)
        return state.is_made and state.identity is not None

    def close(self) -> Iterator[None]:
        """Nothing more is to be written: yields after each step of dropping it.

        What is under way ends as ever.
        """
        for line in self._lines():
            while line:
                for key in list(itertools.islice(line, _AT_ONCE)):
                    self._withdraw(key)
                yield

    def _lines(self) -> list[_Line[T]]:
        return [self._queued, *self._queued_after.values()]

    def _change(self, key: str, epoch: int, identity: Hashable) -> _Key[T]:
        """Note the last change of a key. What waited of it is void."""
        self._withdraw(key)
        state = self._keys.setdefault(key, _Key(epoch, identity))
        state.epoch, state.identity, state.is_made = epoch, identity, False
        return state

    def _queue(self, state: _Key[T], change: TierChange[T]) -> None:
        prefix = _prefix_of(change.key)
        state.line = self._queued
        if self.clearings.is_open(prefix):
            state.line = self._queued_after.setdefault(prefix, OrderedDict())
        state.line[change.key] = change
        self._bound()

    def _unqueue(self, key: str) -> TierChange[T] | None:
        state = self._keys.get(key)
        if state is None or state.line is None:
            return None
        line, state.line = state.line, None
        self._writes.pop(key, None)
        return line.pop(key)

    def _withdraw(self, key: str) -> None:
        """Nothing of the key waits any more."""
        self._unsure.pop(key, None)
        self._undeleted.pop(key, None)
        change = self._unqueue(key)
        if change is not None and not change.is_delete:
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
        elif key not in self._running:  # else it is looked at when that ends
            self._keep(key, self._unsure)

    def _keep(self, key: str, among: OrderedDict[str, None]) -> None:
        among[key] = None
        self._bound()

    def _bound(self) -> None:
        """Know of no more keys than may be. What is known longest is forgotten."""
        while len(self._keys) > self._max_keys:
            known = itertools.chain(self._undeleted, self._unsure, *self._lines())
            key = next(known, None)
            if key is None:
                return  # all are under way
            self._forgotten.note(key, self._keys[key].epoch)
            self._drop(key)

    def _drop(self, key: str) -> None:
        self._withdraw(key)
        if key not in self._running:
            del self._keys[key]


def _prefix_of(key: str) -> str:
    return key[: key.rfind("/") + 1]


def _epoch_of_first(line: _Line[T]) -> int:
    return next(iter(line.values())).epoch
