"""Threads that may hang in a disk for ever: reads go first, and nobody waits for them.

They are daemons, a few, each with something of its own to work with. The loop hears of
what they have done together, a few at a time.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
from collections.abc import Callable
from typing import Any, Final, Generic, TypeAlias, TypeVar

__all__ = ("READ", "SCAN", "WRITE", "Stopped", "TierThreads", "ask")

_T = TypeVar("_T")
_L = TypeVar("_L")

READ: Final = 0
WRITE: Final = 1
SCAN: Final = 2

_AT_ONCE: Final = 8
"""So many results the loop hears of before others have their turn."""

_Done: TypeAlias = Callable[[Any, Exception | None], None]
_Job: TypeAlias = tuple[Callable[[_L], Any], _Done]


class Stopped(Exception):
    """The tier was closed before it was done."""


def ask(
    threads: TierThreads[_L], when: int, work: Callable[[_L], _T]
) -> asyncio.Future[_T]:
    """Run ``work`` in a thread; the future has what comes of it."""
    asked: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

    def done(result: _T | None, error: Exception | None) -> None:
        if asked.done():
            return
        if error is not None:
            asked.set_exception(error)
        else:
            asked.set_result(result)  # type: ignore[arg-type]  # T may be None

    threads.submit(when, work, done)
    return asked


class TierThreads(Generic[_L]):
    """At most ``count`` threads. ``ended`` is called once, by the last one to end.

    Each has what ``own`` returns, which its work is called with.
    """

    def __init__(
        self,
        count: int,
        loop: asyncio.AbstractEventLoop,
        ended: Callable[[], None],
        own: Callable[[], _L],
        *,
        name: str,
    ) -> None:
        self.is_stopping = False
        self.is_over = asyncio.Event()
        self._count = count
        self._loop = loop
        self._ended = ended
        self._own = own
        self._name = name
        self._changed = threading.Condition()
        self._jobs: tuple[collections.deque[_Job[_L]], ...] = tuple(
            collections.deque() for _ in (READ, WRITE, SCAN)
        )
        self._alive = self._idle = 0
        self._results: collections.deque[tuple[_Done, Any, Exception | None]] = (
            collections.deque()
        )
        self._is_told = False

    def submit(
        self,
        when: int,
        work: Callable[[_L], _T],
        done: Callable[[_T | None, Exception | None], None],
    ) -> None:
        """Run ``work`` in a thread, then ``done`` on the loop. Never waits.

        ``done`` has what ``work`` returned, or raised; :exc:`Stopped`, if it was not
        begun.
        """
        with self._changed:
            if self.is_stopping:
                self._tell(done, None, Stopped())
                return
            self._jobs[when].append((work, done))
            waiting = sum(map(len, self._jobs))
            if waiting <= self._idle or self._alive >= self._count:
                self._changed.notify()
                return
            self._alive += 1
        name = f"{self._name} {self._alive}"
        try:
            threading.Thread(target=self._run, name=name, daemon=True).start()
        except RuntimeError as exc:  # the process has as many as it may
            self._leave(exc)

    def check(self) -> None:
        """Called by work between two steps.

        :raises Stopped: nobody needs it any more
        """
        if self.is_stopping:
            raise Stopped

    def stop(self) -> None:
        """Begin nothing more, and end soon what was begun. Never waits."""
        with self._changed:
            if self.is_stopping:
                return
            self.is_stopping = True
            self._refuse_all(Stopped())
            self._changed.notify_all()
            is_over = not self._alive
        if is_over:
            self._end()

    def _run(self) -> None:
        try:
            own = self._own()
        except Exception as exc:  # noqa: BLE001 - as of a job that it would have done
            self._leave(exc.with_traceback(None))
            return
        while (job := self._next()) is not None:
            work, done = job
            result, error = None, None
            try:
                result = work(own)
            except Exception as exc:  # noqa: BLE001 - somebody waits for it
                error = exc.with_traceback(None)
            with self._changed:
                self._tell(done, result, error)
            del job, work, done, result, error
        self._leave(Stopped())

    def _leave(self, error: Exception) -> None:
        """There is one thread less. What only that could have done has failed so."""
        with self._changed:
            self._alive -= 1
            if not self._alive:
                self._refuse_all(error)
            is_last = self.is_stopping and not self._alive
        if is_last:
            self._end()

    def _refuse_all(self, error: Exception) -> None:
        for jobs in self._jobs:
            for _, done in jobs:
                self._tell(done, None, error)
            jobs.clear()

    def _next(self) -> _Job[_L] | None:
        with self._changed:
            while not self.is_stopping:
                for jobs in self._jobs:
                    if jobs:
                        return jobs.popleft()
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            return None

    def _end(self) -> None:
        self._ended()
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            self._loop.call_soon_threadsafe(self.is_over.set)

    def _tell(self, done: _Done, result: Any, error: Exception | None) -> None:
        self._results.append((done, result, error))
        if not self._is_told:
            self._is_told = True
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                self._loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
        with self._changed:
            count = min(len(self._results), _AT_ONCE)
            heard = [self._results.popleft() for _ in range(count)]
            self._is_told = bool(self._results)
            if self._is_told:
                self._loop.call_soon(self._hear)
        for done, result, error in heard:
            done(result, error)
