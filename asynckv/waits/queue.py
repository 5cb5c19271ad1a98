"""The line for what is given first come, first served: one Condition, FIFO tickets.

Who is next, and what it gets, is decided by plain functions; whoever waits looks again
after each change. A cancelled wait takes nobody's turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from asynckv.observability.waits import LoggedWait

__all__ = ("ByteRoom", "FairQueue")

T = TypeVar("T", bound=Hashable)


class FairQueue(Generic[T]):
    """``give(ticket)`` says whether the first one is through with waiting.

    Be it that it got what it waits for, or that it never will. If not, nobody behind
    it gets anything. Who ``passes`` keeps its place, and holds nobody up meanwhile.
    """

    def __init__(
        self,
        give: Callable[[T], bool],
        passes: Callable[[T], bool] = lambda ticket: False,
    ) -> None:
        self._give = give
        self._passes = passes
        self._tickets: dict[T, float] = {}
        self._condition = asyncio.Condition()
        self._waiting = 0
        self._notifying: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """How many are in line."""
        return len(self._tickets)

    def __contains__(self, ticket: object) -> bool:
        return ticket in self._tickets

    def __iter__(self) -> Iterator[T]:
        """Yield those in line, the first one first."""
        return iter(self._tickets)

    def longest_wait_s(self, now_s: float) -> float:
        """How long the first one that holds others up has waited."""
        first = self._first()
        return 0.0 if first is None else now_s - self._tickets[first]

    def join(self, ticket: T) -> bool:
        """Get in line, as the last; ``True`` if it is through at once."""
        is_alone = not self._tickets
        if is_alone and self._give(ticket):
            return True
        self._tickets[ticket] = asyncio.get_running_loop().time()
        if not is_alone:
            self.advance()
        return ticket not in self._tickets

    def quit(self, ticket: T) -> bool:
        """Leave the line. ``False`` if it is not in it: it is through."""
        if self._tickets.pop(ticket, None) is None:
            return False
        self.change()
        return True

    def advance(self) -> None:
        """Give to the first, and to the next, while there is something to give."""
        while (first := self._first()) is not None and self._give(first):
            self._tickets.pop(first, None)

    def change(self) -> None:
        """There may be more to give, or else something has changed. Never waits."""
        if self._tickets:
            self.advance()
        # A Condition is notified under its lock, which a plain function cannot take.
        if self._waiting and (self._notifying is None or self._notifying.done()):
            self._notifying = asyncio.get_running_loop().create_task(
                self._notify(), name="asynckv: a line has changed"
            )

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait until ``predicate()`` is true. A cancelled call leaves no trace."""
        if predicate():
            return
        self._waiting += 1
        try:
            async with self._condition:
                await self._condition.wait_for(predicate)
        finally:
            self._waiting -= 1

    async def until_through(
        self, ticket: T, who: str, what: str, ends_with: str
    ) -> None:
        """Wait, and log it, until a ticket is through.

        Cancelled, it may be in line still, or be through: whoever cancels calls
        :meth:`quit`, and gives back what it got if that says so.
        """
        with LoggedWait(who, what, ends_with):
            await self.until(lambda: ticket not in self._tickets)

    async def aclose(self) -> None:
        """Wait for the last notification."""
        if self._notifying is not None:
            await asyncio.wait({self._notifying})

    def _first(self) -> T | None:
        for ticket in self._tickets:
            if not self._passes(ticket):
                return ticket
        return None

    async def _notify(self) -> None:
        async with self._condition:
            self._condition.notify_all()


class _Claim:
    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class ByteRoom:
    """``max_bytes`` for all; who wants more than that gets them when all are free.

    Logs say that ``who`` waits for ``what``, and that ``ends_with`` ends it.
    """

    def __init__(self, max_bytes: int, *, who: str, what: str, ends_with: str) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._line: FairQueue[_Claim] = FairQueue(self._give)
        self._logged = (who, what, ends_with)

    async def take(self, nbytes: int) -> None:
        """Take ``nbytes``, behind those who asked before.

        A cancelled call leaves no trace.
        """
        claim = _Claim(nbytes)
        if self._line.join(claim):
            return
        who, what, ends_with = self._logged
        try:
            await self._line.until_through(
                claim, f"{who} of {nbytes} bytes", what, ends_with
            )
        except BaseException:
            if not self._line.quit(claim):
                self.release(nbytes)  # it was given in the same tick
            raise

    def release(self, nbytes: int) -> None:
        """Give bytes back. Never waits."""
        self.used_bytes -= nbytes
        self._line.change()

    def _give(self, claim: _Claim) -> bool:
        if self.used_bytes and self.used_bytes + claim.nbytes > self.max_bytes:
            return False
        self.used_bytes += claim.nbytes
        return True
