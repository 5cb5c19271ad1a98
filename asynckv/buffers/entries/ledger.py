"""The state of a lookup buffer, and what an insert does to it step by step.

Rule of this file: every function is plain. Nothing here waits, copies payload
or talks to a peer; :class:`~asynckv.buffers.entries.admission.Admission` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from asynckv.buffers.entries.book import EntryBook, EntryMemory
from asynckv.buffers.entries.entries import EntryState, StoredEntry
from asynckv.buffers.entries.leases import Leases, Matchmaker
from asynckv.buffers.statistics import Counters
from asynckv.tensors.arena import Arena

__all__ = ("Ledger",)


class Ledger:
    """The entries in the ``book``, the ``leases`` on them, and what happened.

    ``changed`` is called whenever room or a state may have changed; ``waiting``
    returns the entries that have no room, the first one first.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        max_deliver: int,
        max_hold_s: float | None,
        changed: Callable[[], None],
        waiting: Callable[[], Iterable[StoredEntry]],
    ) -> None:
        matchmaker = Matchmaker()
        self.counters = Counters()
        self.book = EntryBook(
            EntryMemory(arena, self.counters, self.offer_waiting_soon),
            self.counters,
            hide=matchmaker.hide,
            changed=changed,
        )
        self.leases = Leases(
            self.book,
            matchmaker,
            self.counters,
            max_deliver=max_deliver,
            max_hold_s=max_hold_s,
        )
        self._changed = changed
        self._waiting = waiting
        self._is_offering = False

    def announce(self, entry: StoredEntry) -> None:
        """The entry waits for room: from now on it can be selected."""
        self.leases.offer(entry)

    def give_room(self, entry: StoredEntry) -> bool:
        """Take memory for a waiting entry, if it fits."""
        if not self.book.memory.place(entry):
            return False
        self.leases.offer(entry)
        return True

    def adopt(self, entry: StoredEntry) -> bool:
        """Move a streaming entry that began outside into the arena, if it fits."""
        if not self.book.memory.move_in(entry):
            return False
        for lease in entry.leases.values():
            lease.uncharge()
        return True

    def landed(self, entry: StoredEntry, index: int, digest: bytes) -> None:
        """One part of an entry is whole and verified."""
        if entry.state is EntryState.GONE or entry.parts[index].digest is not None:
            return
        entry.parts[index].digest = digest
        entry.landed.append(index)
        for lease in list(entry.leases.values()):
            lease.holder.part_landed(lease, index)

    def commit(self, entry: StoredEntry) -> None:
        """Every part has landed: the entry is in, or with its direct consumer."""
        if entry.state is EntryState.GONE:
            return
        entry.make_complete()
        if entry.state is not EntryState.DIRECT:
            self.book.make_ready(entry)
        elif not entry.leases:
            self.book.wait_again(entry)
        for lease in list(entry.leases.values()):
            lease.holder.completed(lease)
        self.leases.offer(entry)
        self._changed()  # another insert under its id may wait for that

    def forsake(self, entry: StoredEntry) -> None:
        """The insert was cancelled or failed.

        What has not all landed leaves without a trace; a direct delivery that
        has belongs to its consumer alone from here on.
        """
        if _is_its_consumers(entry):
            self.leases.leave_to_consumers(entry)
        elif entry.state not in (EntryState.GONE, EntryState.READY):
            self.leases.void(entry, "producer")

    def abort_streaming(self, entry: StoredEntry) -> None:
        """The writer failed: the entry is gone and its consumers learn of it."""
        if entry.state is EntryState.GONE:
            return
        if _is_its_consumers(entry):
            self.leases.leave_to_consumers(entry)
        else:
            self.counters.aborted += 1
            self.leases.void(entry, "producer")

    def withdraw(self, entry_id: str) -> bool:
        """Remove an entry that waits or is READY and that nobody holds."""
        entry = self.book.entries.get(entry_id)
        waits = (EntryState.WAITING, EntryState.READY)
        if entry is None or entry.leases or entry.state not in waits:
            return False
        self.counters.withdrawn += 1
        self.book.leave(entry, "withdrawn")
        return True

    def offer_waiting_soon(self) -> None:
        """A consumer may have more bytes that have no room: look on the next tick."""
        if not self._is_offering and not self.leases.is_closed:
            self._is_offering = True
            asyncio.get_running_loop().call_soon(self._offer_waiting)

    def close(self) -> None:
        """Every query ends, and entries leave; see :meth:`Leases.close`."""
        self.leases.close()
        self.book.close()
        self._changed()

    def _offer_waiting(self) -> None:
        self._is_offering = False
        self.leases.offer_waiting(self._waiting())


def _is_its_consumers(entry: StoredEntry) -> bool:
    """Bytes that all landed outside are in nobody's hands but a consumer's."""
    return not entry.in_arena and entry.complete and bool(entry.leases)
