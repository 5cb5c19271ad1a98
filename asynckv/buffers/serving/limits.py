"""What a peer's requests may cost, in memory and in time.

A query keeps its tokens, an insert or a put its names, tokens and small tensors, from
the moment it comes until it ends. Queries and inserts are counted apart: the ones that
wait for the others never keep them out. A remote writer that has been silent for too
long has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from asynckv.errors import EntryAborted, Overloaded

__all__ = (
    "REQUEST_NBYTES",
    "SILENCE_S",
    "KeptBytes",
    "LinkBytes",
    "Silence",
    "WaitingBytes",
)


REQUEST_NBYTES: Final = 2048
"""What a request costs beside what it says: as much as is tested for one."""

_SHARE: Final = 2
"""One link has at most this part of what all have: a half."""


class WaitingBytes:
    """Of all links of a server: so much for queries, and as much for inserts."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._queries = _Whole(max_bytes)
        self._inserts = _Whole(max_bytes)

    @property
    def used_bytes(self) -> int:
        """What requests keep now."""
        return self._queries.used_bytes + self._inserts.used_bytes

    @property
    def refused(self) -> int:
        """How many requests were one too many."""
        return self._queries.refused + self._inserts.refused

    def for_link(self) -> LinkBytes:
        """Return what the requests of one more link are charged to."""
        return LinkBytes(KeptBytes(self._queries), KeptBytes(self._inserts))


class _Whole:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.refused = 0


class LinkBytes:
    """Of one link."""

    def __init__(self, queries: KeptBytes, inserts: KeptBytes) -> None:
        self.queries = queries
        self.inserts = inserts


class KeptBytes:
    """What requests of one kind and link keep."""

    def __init__(self, whole: _Whole) -> None:
        self._whole = whole
        self._used_bytes = 0

    def fits(self, nbytes: int) -> bool:
        """May so many bytes more be kept?"""
        whole = self._whole
        return (
            self._used_bytes + nbytes <= whole.max_bytes // _SHARE
            and whole.used_bytes + nbytes <= whole.max_bytes
        )

    def take(self, nbytes: int) -> None:
        """Charge for a request; each is given back once.

        :raises Overloaded: it cannot be kept; nothing was charged
        """
        whole = self._whole
        if not self.fits(nbytes):
            whole.refused += 1
            raise Overloaded(
                f"the requests of this link keep {self._used_bytes} bytes at the "
                f"server and those of all links {whole.used_bytes}; with {nbytes} "
                f"more it would be over {whole.max_bytes // _SHARE} or "
                f"{whole.max_bytes}"
            )
        self._used_bytes += nbytes
        whole.used_bytes += nbytes

    def give(self, nbytes: int) -> None:
        """The request is over."""
        self._used_bytes -= nbytes
        self._whole.used_bytes -= nbytes


SILENCE_S: Final = 30.0
"""A writer that puts nothing for as long, on a live link, has failed."""


class Silence:
    """Listens from now on, until :meth:`stop`; ``failed`` is told, once, of silence.

    ``landed`` returns how many bytes have come of each transfer that is under way: a
    tensor that comes slowly is no silence. Nor does it count while ``is_working`` says
    that this side has work to do on what came. Nothing here waits.
    """

    def __init__(
        self,
        landed: Callable[[], Mapping[int, int]],
        failed: Callable[[Exception], None],
        *,
        is_working: Callable[[], bool],
    ) -> None:
        self._landed = landed
        self._is_working = is_working
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._landed_bytes: Mapping[int, int] = {}
        self._is_over = False
        self._timer = self._listen()

    def hear(self) -> None:
        """The writer is alive."""
        self._timer.cancel()
        if not self._is_over:
            self._timer = self._listen()

    def stop(self) -> None:
        """Listen no more."""
        self._is_over = True
        self._timer.cancel()

    def _listen(self) -> asyncio.TimerHandle:
        return self._loop.call_later(SILENCE_S, self._fall_silent)

    def _fall_silent(self) -> None:
        landed = self._landed()
        has_grown = landed != self._landed_bytes and any(landed.values())
        if has_grown or self._is_working():
            self._landed_bytes = landed
            self.hear()
            return
        message = f"no tensor came for {SILENCE_S:.0f} s"
        self._failed(EntryAborted(message, reason="producer"))
