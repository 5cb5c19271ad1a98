"""A wait that may last: logged once when it begins, once when it has become long."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType

__all__ = ("LONG_WAIT_S", "LoggedWait")

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
        self._timer = loop.call_later(LONG_WAIT_S, self._warn)
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

    def _warn(self) -> None:
        logger.warning(
            "%s has waited %.0f s for %s; it ends with %s",
            self._what[0],
            LONG_WAIT_S,
            *self._what[1:],
        )
