"""Payload that was promised and stands still: found, and told, in bounded time.

A link's heartbeat says that its control connection lives; its lanes may be cut
all the same, or the peer may never send what it was granted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from asynckv.abc import PayloadTransport
from asynckv.errors import RemoteProtocolError

__all__ = ("OWN_WORK_S", "STALL_S", "Progress")

STALL_S: Final = 30.0
_LOOKS: Final = 6
"""So often within that time is looked: one stall is told at most a sixth later."""

OWN_WORK_S: Final = 300.0
"""So long a copy on this side keeps its transfer from standing still: then it hangs."""

_LATE_S: Final = 1.0
_EARLY_S: Final = 0.001
"""The time of the last look may be a little short of the whole."""

_NO_TRANSFER: Final = -1


class Progress:
    """The transfers of one link whose bytes are expected now.

    ``stalled(error)`` is called once when for 30 s no byte of any of them has
    landed, 5 s later at most. A loop that was stalled itself does not judge for
    that time, nor is a transfer judged while this side is :meth:`working` at it:
    one of which a part is worked on here, and another never sent, is told of 335 s
    after that work began at most.
    """

    def __init__(
        self, payload: PayloadTransport, stalled: Callable[[RemoteProtocolError], None]
    ) -> None:
        self._payload = payload
        self._stalled = stalled
        self._loop = asyncio.get_running_loop()
        self._transfers = Counter[int]()
        self._seen: dict[int, int] = {}
        self._noted_bytes = 0
        self._working: dict[object, tuple[int, float]] = {}
        self._grew_s = 0.0
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, transfer: int) -> None:
        """All bytes of ``transfer`` are on their way, or should be.

        Or those that come by one of two ways: each is to be forgotten then.
        """
        self._transfers[transfer] += 1
        if self._timer is None:
            self._note_growth()
            self._recheck_later()

    def forget(self, transfer: int) -> None:
        """It has landed, or nobody wants it any more."""
        self._transfers[transfer] -= 1
        if self._transfers[transfer] <= 0:
            del self._transfers[transfer]

    def note(self, nbytes: int) -> None:
        """So many bytes came by another way than the payload transport."""
        self._noted_bytes += nbytes

    @contextlib.contextmanager
    def working(self, transfer: int) -> Iterator[None]:
        """Meanwhile bytes of ``transfer`` are copied, or digested, on this side.

        Its peer is not to blame for how long that takes, up to 300 s.
        """
        key = object()
        self._working[key] = transfer, self._loop.time()
        try:
            yield
        finally:
            del self._working[key]

    def is_working(self, transfer: int) -> bool:
        """Are bytes of ``transfer`` worked on here, for less than 300 s so far?"""
        return transfer in self._own(self._loop.time())

    def stop(self) -> None:
        """Watch no more."""
        self._transfers.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _note_growth(self) -> None:
        self._seen, self._grew_s = self._landed(), self._loop.time()

    def _recheck_later(self) -> None:
        pause_s = STALL_S / _LOOKS
        self._due_s = self._loop.time() + pause_s
        self._timer = self._loop.call_later(pause_s, self._recheck)

    def _recheck(self) -> None:
        self._timer = None
        if not self._transfers:
            return
        now_s = self._loop.time()
        # One that came or went, or grew, is progress of them all.
        is_late = now_s > self._due_s + _LATE_S
        if is_late or self._landed() != self._seen or not self._is_owed(now_s):
            self._note_growth()
        elif now_s - self._grew_s > STALL_S - _EARLY_S:
            self._notify()
            return
        self._recheck_later()

    def _is_owed(self, now_s: float) -> bool:
        """Is there a transfer that this side is not at work at?"""
        return not self._own(now_s).issuperset(self._transfers)

    def _own(self, now_s: float) -> set[int]:
        return {x for x, at_s in self._working.values() if now_s - at_s < OWN_WORK_S}

    def _notify(self) -> None:
        self.stop()
        self._stalled(
            RemoteProtocolError(
                f"payload that was to come has stood still for {STALL_S:g} s",
                hint="is something between the peers that drops bulk data?",
            )
        )

    def _landed(self) -> dict[int, int]:
        landed = {x: self._payload.landed_bytes(x) for x in self._transfers}
        return landed | {_NO_TRANSFER: self._noted_bytes}
