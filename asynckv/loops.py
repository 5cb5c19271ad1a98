"""Whose loop it is: an object belongs to the event loop that first used it.

What is used without a loop belongs to a thread in the same way.
"""

from __future__ import annotations

import asyncio
import threading

from asynckv.errors import WrongLoop

__all__ = ("LoopBound", "ThreadBound")


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

    def _check_loop_if_bound(self) -> None:
        """The same for what may also come before a loop runs: it binds nothing.

        :raises WrongLoop: this object has a loop, and that does not run here
        """
        if self._loop is not None:
            self._check_loop()


class ThreadBound:
    """Mixed into what must not be shared between threads, and has plain functions."""

    _thread_id: int | None = None

    def _check_thread(self) -> None:
        """The first call binds this object to its thread. Never waits.

        :raises WrongLoop: this is another thread
        """
        here = threading.get_ident()
        if self._thread_id is None:
            self._thread_id = here
        elif self._thread_id != here:
            raise WrongLoop(f"{type(self).__name__} belongs to another thread")
