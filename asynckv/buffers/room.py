"""Room in a buffer: first come, first served, on one Condition.

Tickets are the entries themselves. An entry that somebody selected while it
waited needs no room for now and lets others pass, but keeps its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asynckv.buffers.changes import Changes
from asynckv.buffers.entries import EntryState, StoredEntry
from asynckv.errors import BufferClosed, EntryAborted, EntryTooLarge
from asynckv.observability.waits import LoggedWait

__all__ = ("Room", "check_not_aborted")

_ENDS_WITH = "a drop_select, a withdraw or aclose"


class Room:
    """The line of entries that have no room in the arena yet.

    ``give_room`` and ``adopt`` try to take memory for the first in line, and
    ``check_size`` raises ``EntryTooLarge`` for what can have none any more;
    ``bound`` says in logs what it is that has no room.
    """

    def __init__(
        self,
        give_room: Callable[[StoredEntry], bool],
        adopt: Callable[[StoredEntry], bool],
        bound: str = "the buffer",
        *,
        check_size: Callable[[StoredEntry], None] = lambda entry: None,
    ) -> None:
        self._give_room = give_room
        self._adopt = adopt
        self._check_size = check_size
        self._bound = bound
        self._line: dict[int, tuple[StoredEntry, float]] = {}
        self._changes = Changes()
        self.closed = False

    def __len__(self) -> int:
        return sum(
            entry.state is EntryState.WAITING for entry, _ in self._line.values()
        )

    def __contains__(self, seq: object) -> bool:
        return seq in self._line

    def entries(self) -> list[StoredEntry]:
        """Return the entries in line, the first one first."""
        return [entry for entry, _ in self._line.values()]

    def oldest_wait_s(self, now: float) -> float:
        """How long the first in line has waited."""
        for entry, since in self._line.values():
            if entry.state is EntryState.WAITING:
                return now - since
        return 0.0

    def join(self, entry: StoredEntry) -> bool:
        """Get in line; ``True`` if nobody was before it and room was had at once.

        :raises BufferClosed: no more entries are taken
        """
        if self.closed:
            raise BufferClosed("the buffer takes no more entries")
        self._line[entry.seq] = (entry, asyncio.get_running_loop().time())
        self.advance()
        return entry.seq not in self._line and entry.state is not EntryState.WAITING

    def quit(self, entry: StoredEntry) -> None:
        """Leave the line; nothing happens if the entry is not in it."""
        if self._line.pop(entry.seq, None) is not None:
            self.change()

    async def turn(self, entry: StoredEntry) -> None:
        """Wait until the entry has room, or was selected without.

        Cancelling leaves the entry in line: whoever cancels calls :meth:`quit`.

        :raises BufferClosed: the buffer was closed meanwhile
        :raises EntryAborted: the entry was withdrawn meanwhile
        :raises EntryTooLarge: it can never fit, since memory was refused
        """
        if entry.state is EntryState.WAITING and not self.closed:
            who = f"insert of {entry.entry_id} ({entry.nbytes} bytes)"
            with LoggedWait(who, f"room in {self._bound}", _ENDS_WITH):
                await self.until(
                    lambda: (
                        entry.state is not EntryState.WAITING
                        or self.closed
                        or entry.seq not in self._line
                    )
                )
        check_not_aborted(entry)
        if entry.state is EntryState.WAITING:
            if not self.closed:
                self._check_size(entry)
            raise BufferClosed("the buffer was closed while the insert waited")

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait for a change of any state. Cancelling leaves no trace."""
        await self._changes.until(predicate)

    def change(self) -> None:
        """Room or a state may have changed. Never waits."""
        if self._line:
            self.advance()
        if self._changes.waiting:
            self._changes.notify_soon()

    def advance(self) -> None:
        """Give room to the first in line, and to the next, while it lasts."""
        while self._line and (entry := self._first_without_room()) is not None:
            if entry.state is EntryState.WAITING:
                moved = not self.closed and self._give_room(entry)
            elif entry.state is not EntryState.GONE and not entry.in_arena:
                moved = self._adopt(entry)
            else:
                moved = True
            if not moved and (self.closed or self._could_fit(entry)):
                break
            self._line.pop(entry.seq, None)

    def _could_fit(self, entry: StoredEntry) -> bool:
        try:
            self._check_size(entry)
        except EntryTooLarge:
            return False
        return True

    def _first_without_room(self) -> StoredEntry | None:
        for entry, _ in self._line.values():
            if entry.state is not EntryState.DIRECT:
                return entry
        return None

    async def aclose(self) -> None:
        """Refuse whoever waits or comes. Waits for the last notification."""
        self.closed = True
        self.change()
        await self._changes.aclose()


def check_not_aborted(entry: StoredEntry) -> None:
    """Tell the insert of an entry that left by anything but an acknowledgement.

    :raises BufferClosed: the buffer was closed
    :raises EntryAborted: it left in another way
    """
    if entry.state is EntryState.GONE and entry.left_by:
        if entry.left_by == "closed":
            raise BufferClosed("the buffer was closed while the entry came in")
        raise EntryAborted(reason=entry.left_by)
