"""The changes of keys that one tier is still to be told, and what is void meanwhile.

Without I/O: whoever carries the changes to the tier says what came of each. Every
change of a key has an epoch, later ones a higher one. Of each key one change is under
way at a time: the last one is the last to arrive, however long an earlier one took.

A tier that was not told of a change may hold an older value of that key: one of an
earlier epoch is void then. That is kept as long as it is so, of so many keys. Of a key
that is forgotten the epoch alone is kept, in a table in which few keys share a place:
what is older is void, of these keys too.

Keys whose names begin alike, up to the last ``/``, can be cleared together. The epoch
of that is kept in such a table, too, and whatever is older is void. The tier is told
when nothing of those keys is under way but what is late; what is changed after that
waits until it has ended, in a line of its own, so that others go on.
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from asynckv.abc.tiers import TierResult

__all__ = ("TierChange", "TierClearing", "ValidFrom", "WriteBehind")

T = TypeVar("T")

_MAX_KEYS: Final = 65_536
_PLACES: Final = 2**20
_MAX_EPOCH: Final = 2**64 - 1
_MAX_CLEARED: Final = 1024
_FORGOTTEN_AT_ONCE: Final = 256
_ENDED: Final = (TierResult.DONE, TierResult.REFUSED)
"""The tier is not asked again to clear a prefix. What it has may be of since then."""


@dataclasses.dataclass(slots=True, eq=False)
class TierChange(Generic[T]):
    """One change of a key: ``value`` is to be written, or, if ``None``, deleted."""

    key: str
    epoch: int
    value: T | None = None
    nbytes: int = 0
    is_delete: bool = dataclasses.field(init=False)
    is_late: bool = False
    """Nobody waits for its call, which may never end: no clearing does, either."""

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


_Line: TypeAlias = "OrderedDict[str, TierChange[T]]"


@dataclasses.dataclass(frozen=True)
class TierClearing:
    """All that begins with ``prefix``, and is older than ``epoch``, is to go."""

    prefix: str
    epoch: int


@dataclasses.dataclass(slots=True, eq=False)
class _Cleared(Generic[T]):
    """The last clearing of a prefix, and what of that is still to be done."""

    epoch: int
    passes: int = 0
    """After so many of them all that is older is forgotten."""
    is_running: bool = False
    result: TierResult | None = None
    """What came of it; ``None``: it is still to end, and changes wait for that."""
    line: _Line[T] = dataclasses.field(default_factory=OrderedDict)
    """Changes of its keys that have come since."""


class _LastEpochs:
    """The last epoch of each name. Few share a place, which has the last of theirs."""

    def __init__(self) -> None:
        # Its 8 MiB take memory as they are written to.
        self._places = memoryview(mmap.mmap(-1, 8 * _PLACES)).cast("Q")

    def note(self, name: str, epoch: int) -> None:
        """The name has this one; an earlier one changes nothing."""
        place = hash(name) % _PLACES
        self._places[place] = max(self._places[place], min(epoch, _MAX_EPOCH))

    def of(self, name: str) -> int:
        """Return it, or a later one; 0: it has none."""
        return self._places[hash(name) % _PLACES]


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
        self._forgotten = _LastEpochs()
        """Of keys: what is older is void."""
        self._void = _LastEpochs()
        """Of prefixes: what is older was cleared."""
        self._given_up = mmap.mmap(-1, _PLACES)
        """Of prefixes: not 0, the tier was not told to clear them, and may not be."""
        self._cleared: dict[str, _Cleared[T]] = {}
        self._unseen: list[str] = []
        """Keys that the pass under way has not looked at: are they cleared?"""
        self._passes = self._wanted_passes = 0
        self._keys: dict[str, _Key[T]] = {}
        # Each key of those is in one of these, in a line of its prefix, or running.
        self._queued: _Line[T] = OrderedDict()
        self._unsure: OrderedDict[str, None] = OrderedDict()
        self._undeleted: OrderedDict[str, None] = OrderedDict()
        self._running: set[TierChange[T]] = set()
        self._writes: dict[str, None] = {}
        """Keys of which a write waits: they are found among ever so many deletes."""

    def __len__(self) -> int:
        """How many changes wait, or are under way."""
        wanted = sum(one.result is None for one in self._cleared.values())
        return sum(map(len, self._lines())) + len(self._running) + wanted

    @property
    def is_full(self) -> bool:
        """Is there room for hardly any more?"""
        return self.nbytes > self._max_bytes // 2

    def is_behind(self, epoch: float) -> bool:
        """Does a change of ``epoch``, or an earlier one, wait or run?"""
        epochs = [*map(_epoch_of_first, self._lines())]
        epochs += [change.epoch for change in self._running]
        epochs += [one.epoch for one in self._cleared.values() if one.result is None]
        return any(one <= epoch for one in epochs)

    @property
    def known_keys(self) -> int:
        """Of how many keys it is known that something older would be void."""
        return len(self._keys)

    def write(
        self, key: str, epoch: int, value: T, nbytes: int, identity: Hashable
    ) -> bool:
        """``value`` is to be written. ``False``: there is no room, it is dropped."""
        others = self._nbytes_without(key)
        cleared = self._cleared_of(key)
        waits = cleared is not None and cleared.result is None
        # What has to wait leaves room to those that go on.
        most = self._max_bytes // 2 if waits else self._max_bytes
        if others and others + nbytes > most:
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

    def drop_writes(self, most: int = 256) -> bool:
        """Some of what waits is not to be written any more. Is there more of it?"""
        for key in list(itertools.islice(self._writes, most)):
            self._unqueue(key)
            self._leave_old(key, self._keys[key])
        return bool(self._writes)

    def delete(self, key: str, epoch: int) -> None:
        """The key is to be deleted."""
        self._queue(self._change(key, epoch, None), TierChange(key, epoch))

    def clear(self, prefix: str, epoch: int) -> str | None:
        """All keys that begin so are to be deleted; nothing of before is valid.

        Returns a prefix that is not cleared any more for that, as too many are to be:
        what the tier has of it stays there, and hidden.
        """
        self._void.note(prefix, epoch)
        if self._passes == self._wanted_passes:
            self._unseen = list(self._keys)
            self._wanted_passes += 1
        else:  # the pass under way has not looked for these
            self._wanted_passes = self._passes + 2
        cleared = self._cleared.setdefault(prefix, _Cleared(epoch))
        cleared.epoch, cleared.passes = epoch, self._wanted_passes
        cleared.result = None
        return self._give_up() if len(self._cleared) > _MAX_CLEARED else None

    def _give_up(self) -> str | None:
        """Keep one prefix less: one whose clearing has ended, or else the oldest."""
        idle = [
            (one.result not in _ENDED, prefix)
            for prefix, one in self._cleared.items()
            if not (one.is_running or one.line)
        ]
        if not idle:
            return None
        is_lost, prefix = min(idle, key=operator.itemgetter(0))
        del self._cleared[prefix]
        self._given_up[hash(prefix) % _PLACES] |= is_lost
        return prefix if is_lost else None

    def forget_cleared(self) -> bool:
        """Let go of some of what was cleared; ``False``: there is nothing of it."""
        if self._passes == self._wanted_passes:
            return False
        for key in self._unseen[-_FORGOTTEN_AT_ONCE:]:
            cleared = self._cleared_of(key)
            if cleared is not None:
                self._forget_older(key, cleared.epoch)
        del self._unseen[-_FORGOTTEN_AT_ONCE:]
        if not self._unseen:
            self._passes += 1
            if self._passes < self._wanted_passes:
                self._unseen = list(self._keys)
        return True

    def take_clearing(self) -> TierClearing | None:
        """Begin a clearing, if one can begin now. It ends by :meth:`clearing_ended`."""
        running = (change for change in self._running if not change.is_late)
        busy = {_prefix_of(change.key) for change in running}
        for prefix, cleared in self._cleared.items():
            is_due = cleared.result is None and cleared.passes <= self._passes
            if is_due and not cleared.is_running and prefix not in busy:
                cleared.is_running = True
                return TierClearing(prefix, cleared.epoch)
        return None

    def clearing_ended(self, clearing: TierClearing, result: TierResult) -> None:
        """Nothing is under way of it. If it has ``FAILED``, changes go on as well."""
        cleared = self._cleared[clearing.prefix]
        cleared.is_running = False
        if cleared.epoch == clearing.epoch:
            cleared.result = result
            if result in _ENDED:
                self._given_up[hash(clearing.prefix) % _PLACES] = 0

    def retry_clearing(self, prefix: str) -> None:
        """What the tier could not clear is to be cleared now, and what came since."""
        cleared = self._cleared.get(prefix)
        if cleared is not None and cleared.result is TierResult.FAILED:
            cleared.result = None

    def take(self, max_changes: int, max_bytes: int) -> list[TierChange[T]]:
        """Begin changes, the oldest first: all of them writes, or all deletes.

        Of writes no more than ``max_bytes``, but for one. Each ends by :meth:`ended`.
        """
        taken: list[TierChange[T]] = []
        for line in sorted(self._lines(is_ready=True), key=_epoch_of_first):
            taken = self._take_of(line, max_changes, max_bytes)
            if taken:
                break
        for change in taken:
            state = self._keys[change.key]
            state.queued, state.running = None, change
            self._line_with(change.key).pop(change.key)
            self._writes.pop(change.key, None)
            self._running.add(change)
        return taken

    def _take_of(
        self, line: _Line[T], max_changes: int, max_bytes: int
    ) -> list[TierChange[T]]:
        taken: list[TierChange[T]] = []
        nbytes = 0
        for change in itertools.islice(line.values(), 4 * max_changes):
            if self._keys[change.key].running is not None:
                continue
            if taken and change.is_delete != taken[0].is_delete:
                continue
            nbytes += change.nbytes
            if taken and (nbytes > max_bytes or len(taken) == max_changes):
                break
            taken.append(change)
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
        cleared = self._cleared_of(key)
        if cleared is not None and cleared.result is None:
            is_in_doubt = state.is_in_doubt or change.is_late
            if state.epoch <= cleared.epoch and not is_in_doubt:
                del self._keys[key]  # it will be cleared
                return
        if is_done and (change.is_delete or state.epoch == change.epoch):
            if not state.is_in_doubt and (self._may_have(key) or change.is_delete):
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

    def retry(self, most: int = 256) -> bool:
        """What the tier has not deleted is to be deleted now. Is there more of it?"""
        for key in list(itertools.islice(self._undeleted, most)):
            del self._undeleted[key]
            state = self._keys[key]
            self._queue(state, TierChange(key, state.epoch))
        return bool(self._undeleted)

    def valid_from(self, key: str) -> ValidFrom:
        """Return what of ``key`` is as new as it should be, if it is read from now on.

        What is read meanwhile may be of before a change that is known no more when it
        has been read: so ask before that, too.
        """
        void_epoch = self._void_epoch(key)
        oldest_epoch = max(self._forgotten.of(key), void_epoch)
        state = self._keys.get(key)
        if state is None or state.epoch < void_epoch:
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
        if state is None or state.epoch < self._void_epoch(key):
            return self._may_have(key)
        return state.is_made and state.identity is not None

    def close(self) -> None:
        """Nothing more is to be written. What is under way ends as ever."""
        for change in self._waiting():
            self._unqueue(change.key)

    def _cleared_of(self, key: str) -> _Cleared[T] | None:
        return self._cleared.get(_prefix_of(key)) if self._cleared else None

    def _void_epoch(self, key: str) -> int:
        """What is older was cleared."""
        return self._void.of(_prefix_of(key)) if self._cleared else 0

    def _may_have(self, key: str) -> bool:
        """May the tier have something valid of a key that is not known here?"""
        cleared = self._cleared_of(key)
        if cleared is not None:
            return cleared.result in _ENDED
        return not (self._cleared and self._given_up[hash(_prefix_of(key)) % _PLACES])

    def _lines(self, *, is_ready: bool = False) -> list[_Line[T]]:
        """Return the lines in which changes wait, or only those that wait for none."""
        lines = [self._queued]
        lines += [
            one.line for one in self._cleared.values() if not is_ready or one.result
        ]
        return [line for line in lines if line]

    def _waiting(self) -> list[TierChange[T]]:
        return [change for line in self._lines() for change in line.values()]

    def _line_with(self, key: str) -> _Line[T]:
        """Return the line that a change of that key waits in, or is to."""
        cleared = self._cleared_of(key)
        return self._queued if cleared is None or key in self._queued else cleared.line

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
        state.queued = self._line_with(change.key)[change.key] = change
        if not change.is_delete:
            self._writes[change.key] = None
        self._bound()

    def _nbytes_without(self, key: str) -> int:
        queued = self._line_with(key).get(key)
        return self.nbytes - (0 if queued is None else queued.nbytes)

    def _unqueue(self, key: str) -> None:
        change = self._line_with(key).pop(key, None)
        if change is None:
            return
        self._keys[key].queued = None
        if not change.is_delete:
            del self._writes[key]
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
            lines = self._lines()
            known = itertools.chain(self._undeleted, self._unsure, *lines)
            key = next(known, None)
            if key is None:
                return  # all are under way
            self._forget(key)

    def _forget(self, key: str) -> None:
        state = self._keys[key]
        self._forgotten.note(key, state.epoch)
        self._drop(key, state)

    def _forget_older(self, key: str, epoch: int) -> None:
        """A key is cleared by ``epoch``: forget what is older of it."""
        state = self._keys.get(key)
        if state is None or state.epoch >= epoch:
            return
        if state.running is None and not state.is_in_doubt:
            self._drop(key, state)
            return
        self._change(key, epoch, None)
        if state.running is None:
            self._unsure[key] = None

    def _drop(self, key: str, state: _Key[T]) -> None:
        self._unqueue(key)
        self._unsure.pop(key, None)
        self._undeleted.pop(key, None)
        if state.running is None:
            del self._keys[key]


def _prefix_of(key: str) -> str:
    return key[: key.rfind("/") + 1]


def _epoch_of_first(line: _Line[T]) -> int:
    return next(iter(line.values())).epoch
