"""The prefixes of keys that one tier is still to clear, and what is void for that.

Without I/O, as :mod:`~asynckv.stores.write_behind`, whose changes of keys wait for what
is still to end here. All that is older than a clearing is void from then on: its epoch
is kept in a table, in which few prefixes share a place, ever so many though they are.

The tier is told when all older changes of those keys are forgotten, and none of them is
under way but what is late.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Container
from typing import Final

from asynckv.abc.tiers import TierResult

__all__ = ("Clearings", "LastEpochs", "TierClearing")

_PLACES: Final = 2**20
_MAX_EPOCH: Final = 2**64 - 1
_MAX_OPEN: Final = 1024


class LastEpochs:
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


@dataclasses.dataclass(frozen=True)
class TierClearing:
    """All that begins with ``prefix``, and is older than ``epoch``, is to go."""

    prefix: str
    epoch: int


@dataclasses.dataclass(slots=True, eq=False)
class _Open:
    """The last clearing of a prefix, which the tier has not made yet."""

    epoch: int
    is_running: bool = False
    """The tier was told of this one, or of an earlier one, and has not answered."""
    has_failed: bool = False
    """It is to be tried again, later, or does not end: changes go on meanwhile."""


class Clearings:
    """The clearings for one tier, by prefix."""

    def __init__(self) -> None:
        self.void = LastEpochs()
        """Of each prefix: what is older was cleared."""
        self.is_unused = True
        """Nothing was ever to be cleared."""
        self._open: dict[str, _Open] = {}
        self._new: set[str] = set()
        self._forgetting: set[str] = set()
        """Older changes of these are looked for, and of the new ones next."""
        self._given_up = mmap.mmap(-1, _PLACES)
        """Not 0: the tier was not told to clear a prefix of this place."""

    def pending_epochs(self) -> list[int]:
        """Return those of all that have still to end, while changes wait for that."""
        return [one.epoch for one in self._open.values() if not one.has_failed]

    def clear(self, prefix: str, epoch: int) -> str | None:
        """All keys that begin so are to be deleted; nothing of before is valid.

        Returns a prefix that is not cleared any more for that, as too many are to be:
        what the tier has of it stays there, and hidden.
        """
        self.is_unused = False
        self.void.note(prefix, epoch)
        one = self._open.setdefault(prefix, _Open(epoch))
        one.epoch, one.has_failed = epoch, one.is_running and one.has_failed
        self._new.add(prefix)
        if len(self._open) <= _MAX_OPEN:
            return None
        idle = (name for name, one in self._open.items() if not one.is_running)
        lost = next(idle, None)
        if lost is not None:
            del self._open[lost]
            self._given_up[hash(lost) % _PLACES] = 1
        return lost

    def begin_forgetting(self) -> bool:
        """Changes of all keys are to be looked at, if this says so."""
        self._forgetting, self._new = self._new, set()
        return bool(self._forgetting)

    def forgotten(self) -> None:
        """Of those that had come when that began nothing older is known any more."""
        self._forgetting.clear()

    def take(self, busy: Container[str]) -> TierClearing | None:
        """Begin one of no ``busy`` prefix, if one is due. It ends by :meth:`ended`."""
        not_yet = self._new | self._forgetting
        for prefix, one in self._open.items():
            is_due = not (one.is_running or one.has_failed or prefix in not_yet)
            if is_due and prefix not in busy:
                one.is_running = True
                return TierClearing(prefix, one.epoch)
        return None

    def ended(self, clearing: TierClearing, result: TierResult) -> None:
        """Nothing is under way of it. If it has ``FAILED``, changes go on as well.

        If it was ``REFUSED``, the tier is not asked again: what it has may be of since.
        """
        one = self._open[clearing.prefix]
        one.is_running = False
        if one.epoch != clearing.epoch:
            one.has_failed = False
            return  # it was cleared again since
        if result in (TierResult.DONE, TierResult.REFUSED):
            del self._open[clearing.prefix]
            self._given_up[hash(clearing.prefix) % _PLACES] = 0
        else:
            one.has_failed = True

    def late(self, clearing: TierClearing) -> None:
        """Unless it has ended, nobody waits for that any more, and changes go on."""
        one = self._open.get(clearing.prefix)
        if one is not None and one.is_running:
            one.has_failed = True

    def retry(self, prefix: str) -> None:
        """What the tier could not clear is to be cleared now, and what came since."""
        one = self._open.get(prefix)
        if one is not None and not one.is_running:
            one.has_failed = False

    def is_open(self, prefix: str) -> bool:
        """Has it still to be cleared, now or when that is tried again?"""
        return prefix in self._open

    def pending_epoch(self, prefix: str) -> int | None:
        """Of the clearing that changes of these keys wait for, if there is one."""
        one = self._open.get(prefix)
        return None if one is None or one.has_failed else one.epoch

    def may_have(self, prefix: str) -> bool:
        """May the tier have something valid of keys of which nothing is known?"""
        return not (self.is_open(prefix) or self._given_up[hash(prefix) % _PLACES])
