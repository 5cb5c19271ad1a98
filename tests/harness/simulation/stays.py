"""When each entry of a buffer came in, was committed, and left, and by what."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

from asynckv.buffers.entries.entries import Draft, StoredEntry
from asynckv.buffers.lookup import LookupBuffer

__all__ = ("Stay", "Stays")


@dataclasses.dataclass(eq=False)
class Stay:
    """One entry in one buffer, in virtual time; it may come again under its id."""

    came: float
    committed: float | None = None
    left: float = math.inf
    reason: str = ""
    """Why it left: nothing for its last acknowledgement."""


class Stays:
    """The stays of one buffer's entries, from its first moment on.

    Looks inside of it as :class:`WaitingSelects` does, but takes only the moments
    from there: whether they are right is judged by what applications did.
    """

    def __init__(self, buffer: LookupBuffer, now: Callable[[], float]) -> None:
        self._now = now
        self._of: dict[str, list[Stay]] = collections.defaultdict(list)
        table = buffer.ledger.table
        admit, make_ready, leave = table.admit, table.make_ready, table.remove

        def admit_and_note(draft: Draft) -> StoredEntry:
            entry = admit(draft)
            self.come(entry.entry_id)
            return entry

        def make_ready_and_note(entry: StoredEntry) -> None:
            make_ready(entry)
            self.commit(entry.entry_id)

        def leave_and_note(entry: StoredEntry, reason: str) -> None:
            leave(entry, reason)
            self.leave(entry.entry_id, reason)

        vars(table)["admit"] = admit_and_note
        vars(table)["make_ready"] = make_ready_and_note
        vars(table)["remove"] = leave_and_note

    def come(self, entry_id: str) -> None:
        """An entry begins to be here."""
        self._of[entry_id].append(Stay(self._now()))

    def commit(self, entry_id: str) -> None:
        """It is whole; its ttl counts from now."""
        self._of[entry_id][-1].committed = self._now()

    def leave(self, entry_id: str, reason: str) -> None:
        """It is not here any more."""
        stay = self._of[entry_id][-1]
        stay.left, stay.reason = self._now(), reason

    def of(self, entry_id: str) -> Sequence[Stay]:
        """Return the stays under that id, in their order."""
        return self._of.get(entry_id, ())
