"""The state of a lookup buffer, and what an insert does to it step by step.

Rule of this file: every function is plain. Nothing here waits, copies payload
or talks to a peer; :class:`~asynckv.buffers.entries.admission.Admission` does.
Room is given first come, first served. Tickets of the line are the entries themselves:
one that somebody selected while it waited needs no room for now and lets others pass,
but keeps its place.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterator
from typing import Final

from asynckv.buffers.entries.entries import EntryState, StoredEntry
from asynckv.buffers.entries.leases import Leases, Matcher
from asynckv.buffers.entries.table import EntryMemory, EntryTable
from asynckv.buffers.statistics import Counters
from asynckv.errors import BufferClosed
from asynckv.tensors.arena import Arena
from asynckv.waits.waiting import FairQueue, in_turns

__all__ = ("Ledger",)

_AT_A_TIME: Final = 64


class Ledger:
    """The entries in the ``table``, the ``leases`` on them, and what happened.

    ``room`` is the line of entries that have no room in the arena yet; it is told of
    each change of room, or of a state. None joins it once the ledger ``is_closing``.
    """

    def __init__(
        self, arena: Arena, *, max_deliver: int, max_hold_s: float | None
    ) -> None:
        matcher = Matcher()
        self.counters = Counters()
        self.is_closing = False
        self.room: FairQueue[StoredEntry] = FairQueue(self._is_through, _is_selected)
        self.table = EntryTable(
            EntryMemory(arena, self.counters, self.offer_waiting_soon),
            self.counters,
            unlist=matcher.remove,
            changed=self.room.change,
        )
        self.leases = Leases(
            self.table,
            matcher,
            self.counters,
            max_deliver=max_deliver,
            max_hold_s=max_hold_s,
        )
        self._is_offering = self._must_offer = False

    @property
    def waiting_inserts(self) -> int:
        """How many entries have no room, and were not selected without."""
        return sum(entry.state is EntryState.WAITING for entry in self.room)

    def check_open(self) -> None:
        """Refuse new entries once the buffer is being closed.

        :raises BufferClosed: it is
        """
        if self.is_closing:
            raise BufferClosed("the buffer takes no more entries")

    def ask_for_room(self, entry: StoredEntry) -> bool:
        """Let an entry have room; ``False`` if it has to wait for that, in line.

        Without room it can be selected as well.

        :raises BufferClosed: the buffer takes no more entries
        """
        if entry not in self.room:
            self.check_open()
            if self.room.join(entry) and entry.state is not EntryState.WAITING:
                return True
        self.leases.offer(entry)
        if entry.state is EntryState.WAITING:
            is_full = not self.table.memory.is_growing_for(entry)
            self.counters.room_waits += is_full
        return False

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
            self.table.make_ready(entry)
        elif not entry.leases:
            self.table.wait_again(entry)
        for lease in list(entry.leases.values()):
            lease.holder.completed(lease)
        self.leases.offer(entry)
        self.room.change()  # another insert under its id may wait for that

    def forsake(self, entry: StoredEntry) -> None:
        """The insert was cancelled or failed.

        What has not all landed leaves without a trace; a direct delivery that
        has belongs to its consumer alone from here on.
        """
        if _is_its_consumers(entry):
            self.leases.keep_for_consumers(entry)
        elif entry.state not in (EntryState.GONE, EntryState.READY):
            self.leases.void(entry, "producer")

    def abort_streaming(self, entry: StoredEntry) -> None:
        """The writer failed: the entry is gone and its consumers learn of it."""
        if entry.state is EntryState.GONE:
            return
        if _is_its_consumers(entry):
            self.leases.keep_for_consumers(entry)
        else:
            self.counters.aborted += 1
            self.leases.void(entry, "producer")

    def withdraw(self, entry_id: str) -> bool:
        """Remove an entry that waits or is READY and that nobody holds."""
        entry = self.table.entries.get(entry_id)
        waits = (EntryState.WAITING, EntryState.READY)
        if entry is None or entry.leases or entry.state not in waits:
            return False
        self.counters.withdrawn += 1
        self.table.remove(entry, "withdrawn")
        return True

    def offer_waiting_soon(self) -> None:
        """A consumer may have more bytes that have no room: look on the next tick.

        Of many entries some are offered in each.
        """
        self._must_offer = True
        if not self._is_offering and not self.leases.is_closed:
            self._is_offering = True
            asyncio.get_running_loop().call_soon(in_turns, self._offering())

    def refuse_inserts(self) -> None:
        """No entry comes in any more; those that wait for room learn it."""
        self.is_closing = True
        self.room.change()

    def close(self) -> None:
        """Every query ends, and entries leave; see :meth:`Leases.closing`."""
        collections.deque(self.closing(), maxlen=0)

    def closing(self) -> Iterator[None]:
        """As :meth:`close`; where it yields others may have their turn."""
        self.is_closing = True
        yield from self.leases.closing()
        self.table.close()
        self.room.change()

    def _offering(self) -> Iterator[None]:
        while self._must_offer:
            self._must_offer = False
            for number, entry in enumerate(list(self.room), 1):
                if entry.state is EntryState.WAITING:
                    self.leases.offer(entry)
                if not number % _AT_A_TIME:
                    yield  # what changes meanwhile is for one more pass
        self._is_offering = False

    def _is_through(self, entry: StoredEntry) -> bool:
        if entry.state is EntryState.WAITING:
            has_room = not self.is_closing and self.table.memory.place(entry)
            if has_room:
                self.leases.offer(entry)
        elif entry.state is not EntryState.GONE and not entry.in_arena:
            has_room = self._move_in(entry)
        else:
            return True
        return has_room or not (
            self.is_closing or self.table.memory.could_ever_fit(entry)
        )

    def _move_in(self, entry: StoredEntry) -> bool:
        """Charge the arena for a streaming entry that began outside, if it fits."""
        if not self.table.memory.move_in(entry):
            return False
        for lease in entry.leases.values():
            lease.uncharge()
        return True


def _is_selected(entry: StoredEntry) -> bool:
    return entry.state is EntryState.DIRECT


def _is_its_consumers(entry: StoredEntry) -> bool:
    """Bytes that all landed outside are in nobody's hands but a consumer's."""
    return not entry.in_arena and entry.complete and bool(entry.leases)
