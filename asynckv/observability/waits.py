"""A wait that may last: logged once when it begins, once when it has become long."""

from __future__ import annotations

import asyncio
import itertools
import logging
from types import TracebackType

__all__ = ("LONG_WAIT_S", "LoggedWait", "LoggedWaits")

logger = logging.getLogger(__name__)

LONG_WAIT_S = 30.0


class LoggedWait:
    """Logs "WHO waits for WHAT" at debug, and as a warning after 30 s.

    ``until`` says what would end the wait. Used around one ``await``.
    """

    __slots__ = ("_timer", "_what")

    def __init__(self, who: str, what: str, until: str) -> None:
        self._what = (who, what, until)
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> LoggedWait:
        logger.debug("%s waits for %s; it ends with %s", *self._what)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LONG_WAIT_S, _warn, *self._what)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class LoggedWaits:
    """As many :class:`LoggedWait` of one kind, with one timer for all of them.

    For waits that usually end within a millisecond: :meth:`begin` and
    :meth:`end` cost next to nothing. ``who`` has a ``%s`` for each detail that
    :meth:`begin` is given.
    """

    __slots__ = ("_numbers", "_since", "_timer", "_what")

    def __init__(self, who: str, what: str, until: str) -> None:
        self._what = (who, what, until)
        self._numbers = itertools.count()
        self._since: dict[int, tuple[float, tuple[object, ...]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, *details: object) -> int:
        """Log a wait; its number is for :meth:`end`."""
        if logger.isEnabledFor(logging.DEBUG):
            who, *rest = self._what
            logger.debug("%s waits for %s; it ends with %s", who % details, *rest)
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        self._since[number] = loop.time(), details
        if self._timer is None:
            self._timer = loop.call_later(LONG_WAIT_S, self._look)
        return number

    def end(self, number: int) -> None:
        """That wait is over."""
        self._since.pop(number, None)

    def _look(self) -> None:
        """Warn of what has become long; the others are looked at when they have."""
        loop = asyncio.get_running_loop()
        self._timer = None
        for number, (since, details) in list(self._since.items()):
            left_s = since + LONG_WAIT_S - loop.time()
            if left_s > 0:
                self._timer = loop.call_later(left_s, self._look)
                return
            del self._since[number]
            who, what, until = self._what
            _warn(who % details, what, until)


def _warn(who: str, what: str, until: str) -> None:
    logger.warning(
        "%s has waited %.0f s for %s; it ends with %s", who, LONG_WAIT_S, what, until
    )
