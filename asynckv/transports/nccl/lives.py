"""The lives of a pipe: opened by both sides, broken by either, and opened again.

One side leads: the one whose worker has the lower token. It asks for the other's worker
when it has its own, so workers that are shared are taken in one order everywhere, and
nobody waits in a circle. No I/O, no clock.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from asynckv.errors import RemoteProtocolError

__all__ = ("Life", "LifeState")

LifeState: TypeAlias = Literal["new", "opening", "open", "breaking", "over"]


class Life:
    """One pipe, as one side sees it.

    From ``opening`` it is ``open`` once both sides have met; from either it is
    ``breaking`` once a side has failed, until both have said that nothing moves any
    more. A pipe that is ``over`` may be opened again, as the next generation.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.state: LifeState = "new"
        self.failures = 0
        """Of generations since one was open."""
        self._has_met = [False, False]
        self._is_quiet = [False, False]

    @property
    def may_open(self) -> bool:
        """Whether it is time for another generation."""
        return self.state in ("new", "over")

    @property
    def is_quiet_here(self) -> bool:
        """Whether nothing of this generation moves on this side any more."""
        return self.may_open or self._is_quiet[0]

    def begin(self, generation: int) -> None:
        """Both sides are about to open it.

        :raises RemoteProtocolError: it is not time for that generation
        """
        if not self.may_open or generation != self.generation + 1:
            raise RemoteProtocolError(
                f"generation {generation} of a pipe that is {self.state} as "
                f"{self.generation}"
            )
        self.generation = generation
        self.state = "opening"
        self._has_met = [False, False]
        self._is_quiet = [False, False]

    def meet(self, generation: int, *, is_peer: bool = False) -> bool:
        """A side has met the other; whether it is open now."""
        if generation != self.generation or self.state != "opening":
            return False
        self._has_met[is_peer] = True
        if not all(self._has_met):
            return False
        self.state = "open"
        self.failures = 0
        return True

    def fail(self, generation: int) -> bool:
        """It is to be aborted here; whether that is news."""
        if generation != self.generation or self.state not in ("opening", "open"):
            return False
        self.state = "breaking"
        self.failures += 1
        return True

    def quiet(self, generation: int, *, is_peer: bool = False) -> bool:
        """Nothing moves on that side any more; whether it is over now."""
        if generation != self.generation or self.state not in ("breaking",):
            return False
        self._is_quiet[is_peer] = True
        if not all(self._is_quiet):
            return False
        self.state = "over"
        return True
