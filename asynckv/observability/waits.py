"""A wait that may last: logged once when it begins, once when it has become long."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from asynckv.observability.lines import as_line

__all__ = ("LONG_WAIT_S", "LoggedWait", "LoggedWaits")

T = TypeVar("T")

logger = logging.getLogger(__name__)

LONG_WAIT_S = 30.0
_SAME_S = 0.01
_AT_ONCE = 32


class LoggedWait:
    """Logs "WHO waits for WHAT" at debug, and as a warning after 30 s.

    ``until`` says what would end the wait. Used around one ``await``.
    """

    __slots__ = ("_timer", "_what")

    def __init__(self, who: str, what: str, until: str) -> None:
        self._what = (who, what, until)
        self._timer: asyncio.TimerHandle

    def __enter__(self) -> LoggedWait:
        _log_begin(*self._what)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LONG_WAIT_S, _warn, *self._what)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()


class LoggedWaits(Generic[T]):
    """The waits of one kind that are under way, with one timer for all of them.

    For waits that usually end within a millisecond: :meth:`begin` and
    :meth:`end` cost next to nothing. ``who`` names a wait, if it is to be logged.
    """

    __slots__ = (
        "_is_logged",
        "_long",
        "_loop",
        "_now",
        "_since",
        "_timer",
        "_what",
        "_who",
    )

    def __init__(self, who: Callable[[T], str], what: str, until: str) -> None:
        self._who = who
        self._what = (what, until)
        self._loop: asyncio.AbstractEventLoop | None = None
        # For those who begin at about the same time: one number, one look at the log.
        self._now = -math.inf
        self._is_logged = False
        self._since: dict[T, float] = {}
        self._long: set[T] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._since) + len(self._long)

    def begin(self, wait: T) -> None:
        """From now on ``wait`` is one of them."""
        if (loop := self._loop) is None:
            loop = self._loop = asyncio.get_running_loop()
        if (now := loop.time()) - self._now > _SAME_S:
            self._now = now
            self._is_logged = logger.isEnabledFor(logging.DEBUG)
        if self._is_logged:
            _log_begin(self._who(wait), *self._what)
        self._since[wait] = self._now
        if self._timer is None:
            self._timer = loop.call_later(LONG_WAIT_S, self._recheck)

    def end(self, wait: T) -> None:
        """That wait is over."""
        if self._since.pop(wait, None) is None:
            self._long.discard(wait)

    def _recheck(self) -> None:
        """Warn of what has become long; the others are looked at when they have."""
        loop = asyncio.get_running_loop()
        self._timer, left_s = None, 0.0
        for wait, since in list(itertools.islice(self._since.items(), _AT_ONCE)):
            left_s = max(since + LONG_WAIT_S - loop.time(), 0.0)
            if left_s:
                break
            del self._since[wait]
            self._long.add(wait)
            _warn(self._who(wait), *self._what)
        if self._since:
            self._timer = loop.call_later(left_s, self._recheck)


def _log_begin(who: str, what: str, until: str) -> None:
    logger.debug("%s waits for %s; it ends with %s", as_line(who), what, until)


def _warn(who: str, what: str, until: str) -> None:
    logger.warning(
        "%s has waited %.0f s for %s; it ends with %s",
        as_line(who),
        LONG_WAIT_S,
        what,
        until,
    )
