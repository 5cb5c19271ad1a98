"""A request's life in a connector: which transfers are under way, and what is told.

Pure: no clock, no loop, no tensor. For each (request, direction) there is one life at a
time, and its end is told exactly once; whatever else is said of it is only counted.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import Final, Literal, TypeAlias

__all__ = ("Life", "Phase", "TransferCounters", "TransferLedger", "Way")

Way: TypeAlias = Literal["send", "recv"]

_REMEMBERED: Final = 4096
"""Ended ones of which it is still known that they were here."""


class Phase(enum.Enum):
    """Where a transfer is in its life."""

    MOVING = "moving"
    """Issued. Memory may be read or written by it."""
    STOPPING = "stopping"
    """Cancelled; memory is not quiet yet."""
    DONE = "done"
    """Everything arrived; nobody was told yet."""
    FAILED = "failed"
    """Ended without that, and memory is quiet; nobody was told yet."""
    TOLD = "told"
    """Over."""


@dataclasses.dataclass(eq=False, slots=True)
class Life:
    """One transfer of one request. Whoever moves its bytes keeps it as a token.

    With ``lacks_room`` it failed as there was no room where it would have been kept.
    """

    request_id: str
    way: Way
    block_ids: frozenset[int] = frozenset()
    phase: Phase = Phase.MOVING
    reason: str = ""
    is_cancelled: bool = False
    lacks_room: bool = False

    @property
    def is_over(self) -> bool:
        """Whether memory is quiet."""
        return self.phase not in (Phase.MOVING, Phase.STOPPING)


@dataclasses.dataclass(slots=True)
class TransferCounters:
    """What was said of transfers, and what of it did not count."""

    begun: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    late: int = 0
    duplicate: int = 0
    unknown: int = 0


class TransferLedger:
    """Every transfer of one side, by request and direction.

    Nothing here raises for what a peer or an engine says too late, twice or of
    somebody unknown: it is counted.
    """

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._lives: dict[tuple[str, Way], Life] = {}
        self._ended: collections.OrderedDict[tuple[str, Way], None] = (
            collections.OrderedDict()
        )
        self._remembered = remembered
        self._untold: list[Life] = []
        self.counters = TransferCounters()

    def __len__(self) -> int:
        """How many are not told yet."""
        return len(self._lives)

    def begin(
        self, request_id: str, way: Way, block_ids: frozenset[int] = frozenset()
    ) -> Life | None:
        """A transfer is issued; ``None``, and counted, if one is under way already."""
        name = (request_id, way)
        if name in self._lives:
            self.counters.duplicate += 1
            return None
        self._ended.pop(name, None)
        life = self._lives[name] = Life(request_id, way, block_ids)
        self.counters.begun += 1
        return life

    def find(self, request_id: str, way: Way) -> Life | None:
        """Return the transfer that is not told yet, if there is one."""
        return self._lives.get((request_id, way))

    def cancel(self, request_id: str, way: Way) -> Life | None:
        """Nobody wants it any more: return what has to be stopped, if anything has."""
        life = self._lives.get((request_id, way))
        if life is None:
            self._count_stranger((request_id, way))
            return None
        if life.phase is not Phase.MOVING:
            return None
        life.phase, life.is_cancelled = Phase.STOPPING, True
        self.counters.cancelled += 1
        return life

    def settle(self, life: Life, reason: str = "") -> bool:
        """A transfer has ended and its memory is quiet: done, or why it failed.

        One that was cancelled has failed, even if all of it had arrived. ``False``, and
        counted, if it was over before.
        """
        if self._lives.get((life.request_id, life.way)) is not life:
            self.counters.late += 1
            return False
        if life.is_over:
            self.counters.duplicate += 1
            return False
        if life.phase is Phase.STOPPING:
            reason = reason or "cancelled"
        life.phase = Phase.FAILED if reason else Phase.DONE
        life.reason = reason
        self.counters.failed += bool(reason)
        self.counters.done += not reason
        self._untold.append(life)
        return True

    def hear(self, request_id: str, way: Way, reason: str = "") -> Life | None:
        """Somebody else says that a transfer has ended: whose it is, if it counts."""
        life = self._lives.get((request_id, way))
        if life is None:
            self._count_stranger((request_id, way))
            return None
        return life if self.settle(life, reason) else None

    def take_untold(self) -> list[Life]:
        """Return what has ended since the last call, once. They are forgotten."""
        told, self._untold = self._untold, []
        for life in told:
            life.phase = Phase.TOLD
            name = (life.request_id, life.way)
            del self._lives[name]
            self._ended[name] = None
        while len(self._ended) > self._remembered:
            self._ended.popitem(last=False)
        return told

    def _count_stranger(self, name: tuple[str, Way]) -> None:
        if name in self._ended:
            self.counters.late += 1
        else:
            self.counters.unknown += 1
