"""Cancelling one call again and again: first everywhere, then at random moments."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from types import CodeType
from typing import Any, Final, TypeVar

from asynckv.testing.cancellation import CancelMode, Outcome, Round

__all__ = ("MODES", "Check", "Sweeper", "ticks")

_T = TypeVar("_T")

Check = Callable[[Outcome[Any]], Awaitable[object]]

MODES: Final[tuple[CancelMode, ...]] = (
    "task",
    "scope",
    "timeout",
    "again",
    "completion",
)

_MAX_TICKS: Final = 6
_TIMEOUT_S: Final = 30.0


async def ticks(count: int) -> None:
    """Let the event loop go round so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


class Sweeper:
    """Cancels calls, and counts.

    Without ``chance`` each call is cancelled at each suspension by each of
    ``MODES``, and once not at all. With it, ``rounds_each`` times, by one of them
    at some suspension that was seen before and some ticks after it, and whoever
    acts beside the call does so some ticks later.

    ``cancelled`` counts the rounds that ended by their cancellation; ``places``
    holds the code of each coroutine that was suspended when it was cancelled.
    """

    def __init__(self) -> None:
        self.chance: random.Random | None = None
        self.rounds_each = 10
        self.rounds = 0
        self.cancelled = 0
        self.places: set[CodeType] = set()
        self._suspensions: dict[str, int] = {}

    async def pause(self) -> None:
        """Wait for some ticks, none in the first sweep."""
        if self.chance is not None:
            await ticks(self.chance.randrange(_MAX_TICKS))

    async def sweep(
        self,
        name: str,
        operation: Callable[[], Coroutine[Any, Any, _T]],
        check: Check,
        before: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Cancel a fresh ``operation()`` in each round, and ``check`` what is left.

        ``name`` is that of the call, for its errors and for what is known of it.

        :raises BaseException: what the call or its check raised, with the round
        """
        if self.chance is None:
            for mode in MODES:
                k = 0 if mode == "task" else 1
                while await self._round(
                    name, Round(mode, k, timeout_s=_TIMEOUT_S), operation, check, before
                ):
                    k += 1
            return
        if not (suspensions := self._suspensions.get(name, 0)):
            return  # all of it is one step
        for _ in range(self.rounds_each):
            mode = self.chance.choice(MODES)
            k = self.chance.randint(1, suspensions)
            late = self.chance.choice((0, 0, self.chance.randrange(_MAX_TICKS)))
            round_ = Round(mode, k, ticks=late, timeout_s=_TIMEOUT_S)
            await self._round(name, round_, operation, check, before)

    async def _round(
        self,
        name: str,
        round_: Round,
        operation: Callable[[], Coroutine[Any, Any, Any]],
        check: Check,
        before: Callable[[], Awaitable[object]] | None,
    ) -> bool:
        async def look(k: int, mode: CancelMode, outcome: Outcome[Any]) -> None:
            await check(outcome)

        try:
            outcome = await round_.run(operation, look, before)
        except BaseException as exc:
            exc.add_note(f"{name}, {round_}")
            raise
        self.rounds += 1
        self.cancelled += outcome.cancelled
        self.places.update(round_.places)
        if round_.mode != "again":  # it may go round and round while it is cancelled
            known = self._suspensions.get(name, 0)
            self._suspensions[name] = max(known, round_.suspensions)
        return round_.k <= round_.suspensions
