"""Whose loop it is: an object belongs to the event loop that first used it."""

from __future__ import annotations

import asyncio

from asynckv.errors import WrongLoop

__all__ = ("LoopBound",)


class LoopBound:
    """Mixed into what must not be shared between event loops or threads.

    It may be made anywhere, also before a loop runs.
    """

    _loop: asyncio.AbstractEventLoop | None = None

    def _check_loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop; the first call binds this object to it.

        To be called first by every public coroutine. Never waits.

        :raises WrongLoop: another loop runs here, or none does
        """
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            raise WrongLoop(
                f"{type(self).__name__} used where no event loop is running"
            ) from None
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise WrongLoop(f"{type(self).__name__} belongs to another event loop")
        return running
