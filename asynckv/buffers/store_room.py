"""Puts that wait for room in a store, first come, first served."""

from __future__ import annotations

import collections
import dataclasses

from asynckv.buffers.entries.admission import Changes
from asynckv.buffers.store_ledger import PendingPut, StoreLedger, StoreName
from asynckv.errors import BufferClosed, EntryTooLarge
from asynckv.observability.waits import LoggedWait
from asynckv.types import TensorSpec

__all__ = ("StoreRoom",)


@dataclasses.dataclass(slots=True, eq=False)
class _Ticket:
    """One put's place in the line; ``pending`` is what it waited for.

    Over without it, it can never have any.
    """

    name: StoreName
    spec: TensorSpec
    since_s: float
    pending: PendingPut | None = None
    is_over: bool = False


class StoreRoom:
    """The line before a store's ledger."""

    def __init__(self, ledger: StoreLedger) -> None:
        self._ledger = ledger
        self._changes = Changes()
        self._line: collections.deque[_Ticket] = collections.deque()

    def __len__(self) -> int:
        return len(self._line)

    def longest_wait_s(self, now_s: float) -> float:
        """How long the first in line has waited."""
        return now_s - self._line[0].since_s if self._line else 0.0

    def reserve_nowait(self, name: StoreName, spec: TensorSpec) -> PendingPut | None:
        """Take memory for a value; ``None`` where there is none, or a line for it."""
        return None if self._line else self._ledger.reserve(name, spec)

    async def reserve(
        self, name: StoreName, spec: TensorSpec, *, now_s: float
    ) -> PendingPut:
        """Wait for memory, last in line. A cancelled call leaves no trace.

        :raises BufferClosed: the ledger was closed meanwhile
        :raises EntryTooLarge: it can never fit, since memory was refused
        """
        ticket = _Ticket(name, spec, now_s)
        self._line.append(ticket)
        self._ledger.counters.room_waits += not self._ledger.is_growing_for(spec)
        try:
            return await self._turn_of(ticket)
        except BaseException:
            self._quit(ticket)
            raise

    def advance(self) -> None:
        """Give room to the first in line, and to the next, while it lasts."""
        while self._line and not self._ledger.closed:
            ticket = self._line[0]
            ticket.pending = self._ledger.reserve(ticket.name, ticket.spec)
            if ticket.pending is None and self._ledger.could_ever_fit(ticket.spec):
                break
            ticket.is_over = True
            self._line.popleft()
        self._changes.notify_soon()

    async def aclose(self) -> None:
        """Wait until whoever waited was told."""
        await self._changes.aclose()

    async def _turn_of(self, ticket: _Ticket) -> PendingPut:
        who = f"put of {ticket.name[0]!r} ({ticket.spec.nbytes} bytes)"
        with LoggedWait(who, "room", "the end of a get or put, or aclose"):
            await self._changes.until(lambda: ticket.is_over or self._ledger.closed)
        if self._ledger.closed:
            raise BufferClosed("the buffer was closed while the put waited")
        if ticket.pending is None:
            raise EntryTooLarge(
                nbytes=ticket.spec.nbytes, max_bytes=self._ledger.max_bytes
            )
        return ticket.pending

    def _quit(self, ticket: _Ticket) -> None:
        if ticket.pending is not None:
            self._ledger.discard(ticket.pending)
        elif not ticket.is_over:
            self._line.remove(ticket)
            self.advance()
