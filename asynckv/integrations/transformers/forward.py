"""One call of a model in a thread of its own, which can be stopped.

Never the default executor: a forward takes seconds, and others wait there.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from asynckv.waits.waiting import wait_shielded

__all__ = ("Forward", "ForwardStopped", "in_thread")

T = TypeVar("T")

_STOP_GRACE_S = 1.0


class ForwardStopped(RuntimeError):
    """Ends a forward at its next layer. Seen by nobody who did not ask for it."""


class Forward(Generic[T]):
    """Runs ``call`` in a thread, as soon as it is made.

    ``stop`` makes ``call`` fail soon: at its next layer. It is called on the
    loop, any number of times.
    """

    def __init__(
        self, call: Callable[[], T], stop: Callable[[], None], *, name: str
    ) -> None:
        self._call, self._stop = call, stop
        self._loop = asyncio.get_running_loop()
        self._results: list[T] = []
        self._error: BaseException | None = None
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._context = contextvars.copy_context()
        self.thread = threading.Thread(target=self._run, name=name)
        self.thread.start()

    async def wait(self) -> T:
        """Return what ``call`` returned.

        A cancelled wait leaves it running: :meth:`aclose` stops it.

        :raises BaseException: whatever ``call`` raised
        """
        await asyncio.wait({self.ended})
        return self.result()

    def result(self) -> T:
        """Return what the ended ``call`` returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._results[0]

    async def aclose(self) -> None:
        """Stop ``call`` and wait until its thread is through, at most 1 s.

        Shielded. A layer that takes longer runs on to its end, and the thread
        then ends by itself.
        """
        if self.ended.done():
            return
        self._stop()
        quiet: asyncio.Future[None] = self._loop.create_future()
        grace = self._loop.call_later(_STOP_GRACE_S, _settle, quiet)
        self.ended.add_done_callback(lambda _: _settle(quiet))
        try:
            await wait_shielded(quiet)
        finally:
            grace.cancel()

    def _run(self) -> None:
        try:
            self._results.append(self._context.run(self._call))
        except BaseException as exc:  # noqa: BLE001 - raised again on the loop
            self._error = exc
        # The loop may be closed already: then nobody waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_settle, self.ended)


async def in_thread(call: Callable[[], T], *, name: str) -> T:
    """Return what ``call`` returns, which is short, but not so short as a loop's turn.

    A cancelled call lets it run to its end, and waits for that, at most 1 s.
    """
    work = Forward(call, lambda: None, name=name)
    try:
        return await work.wait()
    finally:
        await work.aclose()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
