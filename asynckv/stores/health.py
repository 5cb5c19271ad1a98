"""Whether to ask a tier at all, and how long to wait for it: in one direction.

Without I/O and without a clock: who uses it says what time it is. What a client says of
its own time-outs is not believed. A call is late when it has moved nothing for the
tier's patience, and for twice the time that all bytes under way take at the rate that
was measured: all those that there were while it was silent, as it may have waited for
them. Time in which nobody looked does not count: then our own loop stood still.

One late call, or three that failed in a row, and the tier is not asked any more; it is
probed after a second, then after two, four, up to thirty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from asynckv.observability.latencies import Latencies

__all__ = ("Moving", "Quarantine", "TierCall", "TierHealth", "TierStatistics")

_LEAST_RATE: Final = 1e6
"""Bytes a second before anything was measured, and at least."""
_ENOUGH_NBYTES: Final = 64 * 1024
"""What takes too short to tell a rate from how long an answer takes."""
_MOST_FAILURES: Final = 3
_FIRST_PROBE_S, _LAST_PROBE_S = 1.0, 30.0


class Moving(Protocol):
    """One item of a call; its tier adds to what has moved, from any thread.

    While it ``is_held`` it waits for us, not for the tier. ``lent_nbytes`` of memory
    are its until the call has ended.
    """

    moved_nbytes: int

    @property
    def is_held(self) -> bool: ...

    @property
    def lent_nbytes(self) -> int: ...


@dataclasses.dataclass(slots=True, eq=False)
class TierCall:
    """One call under way. What its items were lent is what they are to move."""

    items: Sequence[Moving]
    began_s: float
    is_late: bool = False
    silent_s: float = 0.0
    allowed_s: float = 0.0
    moved_nbytes: int = 0

    @property
    def left_nbytes(self) -> int:
        """So much is still to be moved, as far as is known."""
        return max(sum(one.lent_nbytes for one in self.items) - self.moved_nbytes, 0)


class TierHealth:
    """What is known of one tier in one direction."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.rate = 0.0
        """Bytes a second, of all calls together; 0: not measured yet."""
        self.is_open = False
        """The tier is not asked: the breaker is open, as one says."""
        self.late = self.failed = 0
        self._calls: list[TierCall] = []
        self._failures = 0
        self._probe_in_s = _FIRST_PROBE_S
        self._probe_at_s = 0.0
        self._looked_s = 0.0

    @property
    def tick_s(self) -> float:
        """So often at least somebody should look, while calls are under way."""
        return min(max(self.patience_s / 8, 0.005), 0.25)

    @property
    def calls(self) -> int:
        """How many are waited for."""
        return len(self._calls)

    def begin(self, items: Sequence[Moving], now_s: float) -> TierCall:
        """A call begins. It ends by :meth:`end`, or is late."""
        if not self._calls:
            self._looked_s = now_s
        call = TierCall(items, now_s)
        self._calls.append(call)
        return call

    def look_in_s(self) -> float:
        """Return in how many seconds to look: after a tick, or when a call is late."""
        allowed_s = self.allowed_s()
        left_s = [max(one.allowed_s, allowed_s) - one.silent_s for one in self._calls]
        return min(self.tick_s, *left_s) if left_s else self.tick_s

    def look(self, now_s: float) -> list[TierCall]:
        """Return the calls that are late now; they are not waited for any more."""
        looked_s, self._looked_s = self._looked_s, now_s
        for call in self._calls:
            moved = sum(item.moved_nbytes for item in call.items)
            if moved != call.moved_nbytes or any(item.is_held for item in call.items):
                call.moved_nbytes, call.silent_s, call.allowed_s = moved, 0.0, 0.0
            else:
                passed_s = now_s - max(looked_s, call.began_s)
                call.silent_s += min(passed_s, 2 * self.tick_s)
        allowed_s = self.allowed_s()
        for call in self._calls:
            call.allowed_s = max(call.allowed_s, allowed_s)
        late = [call for call in self._calls if call.silent_s >= call.allowed_s]
        for call in late:
            call.is_late = True
            self._calls.remove(call)
            self.late += 1
            self.open(now_s)
        return late

    def allowed_s(self) -> float:
        """Return how long a call may move nothing that falls silent now."""
        left = sum(call.left_nbytes for call in self._calls)
        return self.patience_s + 2 * left / max(self.rate, _LEAST_RATE)

    def end(self, call: TierCall, nbytes: int, now_s: float, *, failed: bool) -> None:
        """A call has ended that moved ``nbytes``. Nothing happens if it was late."""
        if call.is_late:
            return
        self._calls.remove(call)
        took_s = now_s - call.began_s
        if nbytes >= _ENOUGH_NBYTES and took_s > 0:
            # Others were under way: together they were faster by as many.
            rate = nbytes / took_s * (len(self._calls) + 1)
            self.rate += (rate - self.rate) * (0.2 if self.rate else 1.0)
        self._failures = self._failures + 1 if failed else 0
        self.failed += failed
        if self._failures >= _MOST_FAILURES:
            self.open(now_s)

    def leave(self, call: TierCall) -> None:
        """A call is not waited for any more, for a reason that is not the tier's."""
        call.is_late = True
        self._calls.remove(call)

    def open(self, now_s: float) -> None:
        """Do not ask the tier until a probe has been answered."""
        if self.is_open:
            return
        self.is_open = True
        self._probe_at_s = now_s + self._probe_in_s

    def probe_due_s(self, now_s: float) -> float | None:
        """Return in how many seconds to probe; ``None``: there is no need."""
        return max(self._probe_at_s - now_s, 0.0) if self.is_open else None

    def probed(self, now_s: float, *, is_there: bool) -> None:
        """A probe was answered, or not. It counts as success only if calls do."""
        if is_there:
            self.is_open = False
            self._failures = 0
        else:
            self._probe_at_s = now_s + self._probe_in_s
        self._probe_in_s = min(2 * self._probe_in_s, _LAST_PROBE_S)

    def worked(self) -> None:
        """A call was answered as it should be: the next trouble is a first one."""
        self._probe_in_s = _FIRST_PROBE_S


class Quarantine:
    """Memory lent to calls that nobody waits for any more: at most ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.changed: list[Callable[[], None]] = []
        """What is called when there is more of it, or less."""

    def lend(self, nbytes: int) -> None:
        """So much more is lent; less than 0: it was given back. Never waits."""
        self.nbytes += nbytes
        for changed in self.changed:
            changed()

    @property
    def is_full(self) -> bool:
        """May no more calls be made that could end here?"""
        return self.nbytes >= self.max_bytes


@dataclasses.dataclass(frozen=True)
class TierStatistics:
    """A tier at one moment; the counters count since it was opened.

    ``refused`` calls were not made, as the tier does not answer; ``late`` ones were
    waited for no more. ``corrupt`` values were not as they had been written.
    ``fetch_latencies`` and ``store_latencies`` are of its calls, of several values a
    call, until they ended or were waited for no more. ``counts`` are those of
    :meth:`~asynckv.abc.StoreTier.counts`.
    """

    is_loading: bool
    is_storing: bool
    hits: int
    misses: int
    failed: int
    refused: int
    late: int
    corrupt: int
    accepted: int
    dropped: int
    unwritten: int
    waiting: int
    waiting_bytes: int
    fetch_latencies: Latencies
    store_latencies: Latencies
    counts: Mapping[str, float]
