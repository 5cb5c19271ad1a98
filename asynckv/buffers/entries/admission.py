"""How an entry gets in: room first, then its bytes, then the commit.

Local and remote inserts differ only in their :class:`Source`. What is waited for is a
change of the :class:`~asynckv.buffers.entries.ledger.Ledger`, on one Condition that its
plain functions notify.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from asynckv.buffers.entries.entries import Draft, EntryState, StoredEntry
from asynckv.buffers.entries.ledger import Ledger
from asynckv.errors import BufferClosed, EntryAborted, EntryConflict
from asynckv.observability.waits import LoggedWait
from asynckv.tensors.views import no_memory

__all__ = (
    "Admission",
    "Landed",
    "Source",
    "check_not_aborted",
)


_SETTLED = (EntryState.READY, EntryState.GONE)
_ENDS_WITH = "a drop_select, a withdraw or aclose"


def check_not_aborted(entry: StoredEntry) -> None:
    """Tell the insert of an entry that left by anything but an acknowledgement.

    :raises BufferClosed: the buffer was closed
    :raises EntryAborted: it left in another way
    """
    if entry.state is EntryState.GONE and entry.left_by:
        if entry.left_by == "closed":
            raise BufferClosed("the buffer was closed while the entry came in")
        raise EntryAborted(reason=entry.left_by)


Landed = Callable[[int, bytes], None]
"""Called with the number of a part and the digest of its bytes."""


class Source(Protocol):
    """Where the bytes of an entry come from."""

    async def fill(self, entry: StoredEntry, landed: Landed) -> None:
        """Put every part's bytes in its region and call ``landed`` for each.

        When it ends, also by an error or a cancellation, nothing touches the
        regions or the caller's memory any more. It may be called again.
        """


class Admission:
    """Takes entries into one buffer's ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._table = ledger.table
        self._room = ledger.room

    async def insert(
        self, draft: Draft, source: Source, digest: bytes | None = None
    ) -> None:
        """Bring a whole entry in.

        Returns when it is committed, or acknowledged by a consumer that took it
        while there was no room, or at once if the same entry (``digest``) was
        inserted before. What is under way under its id it waits for. Cancelled, it
        leaves as :meth:`Ledger.forsake` says.
        """
        self._ledger.check_open()
        if self._table.is_undecided(draft.entry_id):
            await self._until_decided(draft.entry_id)
        entry = self._admit(draft, digest)
        if entry is None:
            return
        try:
            while entry.state not in _SETTLED:
                if not self._ledger.ask_for_room(entry):
                    await self._wait_for_room(entry)
                if entry.state is EntryState.GONE:
                    break  # acknowledged already, without its bytes
                await source.fill(entry, partial(self._ledger.landed, entry))
                self._ledger.commit(entry)
                if entry.state is EntryState.DIRECT:
                    await self._room.until(
                        lambda: (
                            entry.state is not EntryState.DIRECT
                            or not entry.complete  # given back, and selected again
                            or entry.owner_gone
                        )
                    )
                self._check_owned(entry)
        except BaseException as exc:
            self._ledger.forsake(entry)
            if isinstance(exc, MemoryError):
                raise no_memory(entry.nbytes) from exc
            raise
        finally:
            self._room.quit(entry)

    def insert_nowait(
        self,
        draft: Draft,
        pieces: Sequence[memoryview],
        digests: Sequence[bytes],
        digest: bytes | None = None,
    ) -> bool:
        """As :meth:`insert`, of a few bytes that are here, if nothing is waited for.

        ``False``, and nothing was done, if something is: another insert under its id,
        room, or a GPU.
        """
        self._ledger.check_open()
        if self._room or self._table.is_undecided(draft.entry_id):
            return False
        entry = self._admit(draft, digest)
        if entry is None:
            return True
        is_in = False
        try:
            is_in = self._table.memory.place(entry) and _fill(entry, pieces)
        except MemoryError as exc:
            raise no_memory(entry.nbytes) from exc
        finally:
            if not is_in:
                self._ledger.forsake(entry)
        if is_in:
            for index, found in enumerate(digests):
                self._ledger.landed(entry, index, found)
            self._ledger.commit(entry)
        return is_in

    async def begin(self, draft: Draft) -> StoredEntry:
        """Reserve room for a streaming entry; its parts land one by one.

        What is under way under its id it waits for first. A cancelled call leaves no
        trace.
        """
        self._ledger.check_open()
        if self._table.is_undecided(draft.entry_id):
            await self._until_decided(draft.entry_id)
        entry = self._table.admit(draft)
        try:
            if not self._ledger.ask_for_room(entry):
                await self._wait_for_room(entry)
        except BaseException:
            self._room.quit(entry)
            self._ledger.forsake(entry)
            raise
        return entry

    async def finish(self, entry: StoredEntry) -> None:
        """Commit a streaming entry whose parts have all landed.

        Waits, if it began without room, until it has room or was acknowledged; it
        can turn out that it will never have any, where memory was refused.
        Cancelling that wait aborts the entry, unless a consumer holds it: then
        it is that consumer's alone.
        """
        self._ledger.commit(entry)
        try:
            await self._room.until(
                lambda: (
                    entry.in_arena
                    or entry.owner_gone
                    or entry.state is EntryState.GONE
                    or entry not in self._room
                )
            )
            if not entry.in_arena and entry.state is not EntryState.GONE:
                self._check_owned(entry)
                self._table.memory.check_size(entry)
        except BaseException:
            self.abort(entry)
            raise
        self._room.quit(entry)
        self._check_owned(entry)

    def abort(self, entry: StoredEntry) -> None:
        """The writer of a streaming entry failed. Never waits."""
        self._room.quit(entry)
        self._ledger.abort_streaming(entry)

    async def _wait_for_room(self, entry: StoredEntry) -> None:
        """Wait in line until the entry has room, or was selected without.

        Cancelling leaves the entry in line: whoever cancels takes it out.

        :raises BufferClosed: the buffer takes no more entries, or is closed meanwhile
        :raises EntryAborted: the entry was withdrawn meanwhile
        :raises EntryTooLarge: it can never fit, since memory was refused
        """
        ledger, memory = self._ledger, self._table.memory
        if entry.state is EntryState.WAITING:
            who = f"insert of {entry.entry_id} ({entry.nbytes} bytes)"
            what = f"room in a buffer of {memory.max_bytes} bytes"
            with LoggedWait(who, what, _ENDS_WITH):
                await self._room.until(
                    lambda: (
                        entry.state is not EntryState.WAITING
                        or ledger.is_closing
                        or entry not in self._room
                    )
                )
        check_not_aborted(entry)
        if entry.state is EntryState.WAITING:
            if not ledger.is_closing:
                memory.check_size(entry)
            raise BufferClosed("the buffer was closed while the insert waited")

    async def _until_decided(self, entry_id: str) -> None:
        """Wait while another insert under that id is under way, or ending."""
        what = "the end of another insert under that id"
        with LoggedWait(f"insert of {entry_id}", what, "its commit or its cancel"):
            await self._room.until(
                lambda: (
                    self._ledger.is_closing or not self._table.is_undecided(entry_id)
                )
            )
        self._ledger.check_open()

    def _admit(self, draft: Draft, digest: bytes | None) -> StoredEntry | None:
        """Begin an entry, where one of the same contents broke off, if one did.

        ``None`` if it was inserted before.

        :raises EntryConflict: the id is known, of other contents
        """
        try:
            entry = self._table.admit(draft)
        except EntryConflict:
            if digest is None or digest != self._table.known_digest(draft.entry_id):
                raise
            return None
        if digest is not None:
            self._table.resume(entry, digest)
        return entry

    def _check_owned(self, entry: StoredEntry) -> None:
        check_not_aborted(entry)
        if entry.owner_gone:
            raise BufferClosed(
                "the buffer was closed before the consumer that holds the entry "
                "acknowledged it"
            )


def _fill(entry: StoredEntry, pieces: Sequence[memoryview]) -> bool:
    """Put bytes in the regions, if these are in memory of the host."""
    for part, piece in zip(entry.parts, pieces, strict=True):
        if part.region is None or not part.region.write(piece):
            return False
    return True
