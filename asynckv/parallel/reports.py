"""Which ranks have reported which requests: one direction of transfers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

__all__ = ("Overdue", "Reports")


@dataclasses.dataclass(frozen=True, slots=True)
class Overdue:
    """A request that some ranks have reported, and others should have by now.

    ``missing`` are those that have not; ``needed`` more reports make it complete.
    """

    request_id: str
    direction: str
    reported: tuple[int, ...]
    missing: tuple[int, ...]
    needed: int
    waited_s: float

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.missing))
        return (
            f"{self.direction} of request {self.request_id!r} lacks {self.needed} "
            f"of ranks {ranks} after {self.waited_s:.0f} s"
        )


@dataclasses.dataclass(slots=True)
class _Open:
    expected: int
    since_s: float
    ranks: set[int] = dataclasses.field(default_factory=set)


class Reports:
    """Counts each rank once a request, and remembers which requests are complete.

    What is reported again, before completion or after, changes nothing but the
    counters ``duplicates`` and ``late``. Of complete requests the last ``max_done`` are
    remembered, or until :meth:`forget`.
    """

    def __init__(self, direction: str, *, max_done: int) -> None:
        self.direction = direction
        self.duplicates = 0
        self.late = 0
        self._max_done = max_done
        self._open: dict[str, _Open] = {}
        self._done: dict[str, None] = {}

    def __len__(self) -> int:
        """How many requests some ranks, but not enough, have reported."""
        return len(self._open)

    def add(self, request_id: str, rank: int, *, expected: int, now_s: float) -> bool:
        """Note a report; return whether it made the request complete.

        ``expected`` is for a request that nobody has reported yet.
        """
        if request_id in self._done:
            self.late += 1
            return False
        found = self._open.setdefault(request_id, _Open(expected, now_s))
        if rank in found.ranks:
            self.duplicates += 1
            return False
        found.ranks.add(rank)
        if len(found.ranks) < found.expected:
            return False
        del self._open[request_id]
        self._done[request_id] = None
        if len(self._done) > self._max_done:
            del self._done[next(iter(self._done))]
        return True

    def is_done(self, request_id: str) -> bool:
        """Whether the request is complete, as far as is remembered."""
        return request_id in self._done

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests are over, or begin again: what is reported now is new.

        But what only some ranks have reported stays: the others still will, of this
        transfer, whatever has begun under the same id.
        """
        for request_id in request_ids:
            self._done.pop(request_id, None)

    def is_open(self, request_id: str) -> bool:
        """Whether some ranks, but not enough, have reported the request."""
        return request_id in self._open

    def overdue(
        self, *, world_size: int, now_s: float, deadline_s: float
    ) -> Iterator[Overdue]:
        """Yield what was first reported ``deadline_s`` ago and is not complete."""
        for request_id, found in self._open.items():
            # First reported, first in the dict.
            if (waited_s := now_s - found.since_s) < deadline_s:
                return
            missing = tuple(
                rank for rank in range(world_size) if rank not in found.ranks
            )
            yield Overdue(
                request_id,
                self.direction,
                tuple(sorted(found.ranks)),
                missing,
                found.expected - len(found.ranks),
                waited_s,
            )
