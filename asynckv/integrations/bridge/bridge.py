"""The one door between an engine's thread and asynckv's loop.

What the engine calls in every step never waits for the loop: orders go in by
``call`` and ``start``, news come out of a queue by ``news``.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Generic, TypeVar, TypeVarTuple

from asynckv.errors import WrongLoop
from asynckv.types import as_timeout

__all__ = ("Bridge",)

logger = logging.getLogger(__name__)

_Ts = TypeVarTuple("_Ts")
T = TypeVar("T")
NewsT = TypeVar("NewsT")

_START_S: Final = 10.0
_GRACE_S: Final = 1.0


class Bridge(Generic[NewsT]):
    """One event loop in one daemon thread, from the constructor to ``shutdown``.

    Every object of asynckv that an engine uses is made and used on that loop. From
    the engine's threads call ``call``, ``start`` and ``news``, which never wait, and
    ``run``, ``enter`` and ``shutdown``, which do, where an engine starts and ends.
    On the loop call ``tell``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._news: collections.deque[NewsT] = collections.deque()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ends: list[Callable[[], Awaitable[object]]] = []
        self._closing = threading.Lock()
        self._is_closed = False
        self._started = threading.Event()
        self._thread = threading.Thread(
            target=self._run_loop, name=f"asynckv: {name}", daemon=True
        )
        self._thread.start()
        if not self._started.wait(_START_S):
            raise RuntimeError(f"the loop of {name} did not start")

    @property
    def is_closed(self) -> bool:
        """Whether ``shutdown`` was called."""
        return self._is_closed

    def tell(self, news: NewsT) -> None:
        """Leave something for the engine to fetch with ``news``. From any thread."""
        self._news.append(news)

    def news(self) -> list[NewsT]:
        """Return what was told since the last call, in order; also after shutdown.

        Never waits and takes no lock: for one thread at a time, in every step.
        """
        queue = self._news
        return [queue.popleft() for _ in range(len(queue))] if queue else []

    def call(self, function: Callable[[*_Ts], object], *args: *_Ts) -> None:
        """Call a plain function on the loop, soon, in the order of the calls.

        :raises RuntimeError: the bridge was shut down
        """
        self._check_open()
        self._loop.call_soon_threadsafe(function, *args)

    def start(
        self, function: Callable[[*_Ts], Coroutine[Any, Any, object]], *args: *_Ts
    ) -> None:
        """Run a coroutine on the loop as a task that the bridge owns.

        It ends by itself or is cancelled by ``shutdown``. It should tell of its
        own errors: one that gets out of it is logged.

        :raises RuntimeError: the bridge was shut down
        """
        self.call(self._start, function, args)

    def run(
        self,
        function: Callable[[*_Ts], Coroutine[Any, Any, T]],
        *args: *_Ts,
        timeout_s: float,
    ) -> T:
        """Run a coroutine on the loop and wait for its result.

        :raises TimeoutError: it took longer, and was cancelled
        :raises WrongLoop: called on the loop, which would wait for itself
        :raises RuntimeError: the bridge was shut down, before or meanwhile
        :raises ValueError: ``timeout_s`` is negative, or NaN
        """
        timeout_s = as_timeout(timeout_s, "timeout_s")
        self._check_open()
        self._check_thread()
        running = asyncio.run_coroutine_threadsafe(
            self._bounded(function(*args), timeout_s), self._loop
        )
        try:
            # The loop keeps the time; a loop that is stuck is not waited for.
            return running.result(min(timeout_s + _GRACE_S, threading.TIMEOUT_MAX))
        except concurrent.futures.CancelledError:
            raise RuntimeError(f"{self.name} was shut down meanwhile") from None
        except TimeoutError:
            running.cancel()
            raise

    def enter(
        self,
        make: Callable[[], AbstractAsyncContextManager[T]],
        *,
        timeout_s: float,
    ) -> T:
        """Enter what ``make`` returns, in a task that leaves it at ``shutdown``.

        What was entered last is left first.

        :raises TimeoutError: entering took longer, and was cancelled
        :raises WrongLoop: called on the loop
        :raises RuntimeError: the bridge was shut down
        """
        return self.run(self._enter, make, timeout_s=timeout_s)

    def at_end(self, function: Callable[[], Awaitable[object]]) -> None:
        """Call a coroutine function on the loop at ``shutdown``, when tasks are over.

        What was given last is called first. From any thread.
        """
        self._ends.append(function)

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """End what runs, leave what was entered, and join the thread. Repeatable.

        Tasks are cancelled first and waited for. If all that takes longer, it is
        logged and the thread is left behind: it ends with the process.

        :raises WrongLoop: called on the loop
        """
        self._check_thread()
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("%s did not end within %g s", self.name, timeout_s)

    def _run_loop(self) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._started.set()
        await self._stop.wait()
        # One of them may start another while it ends.
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        while self._ends:
            # Also what such an end starts belongs to somebody who waits for it.
            ending = self._loop.create_task(self._end(self._ends.pop()))
            await asyncio.wait({ending})

    async def _end(self, function: Callable[[], Awaitable[object]]) -> None:
        try:
            await function()
        except Exception:
            # Whatever the caller's code raises: the other ends run all the same.
            logger.exception("%s did not end cleanly", self.name)

    def _start(
        self,
        function: Callable[..., Coroutine[Any, Any, object]],
        args: tuple[Any, ...],
    ) -> None:
        task = self._loop.create_task(
            function(*args), name=f"asynckv: {self.name}: {function.__name__}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)

    async def _bounded(self, coroutine: Awaitable[T], timeout_s: float) -> T:
        task = asyncio.current_task()
        if task is not None:  # always: this is how a coroutine runs
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        async with asyncio.timeout(timeout_s):
            return await coroutine

    async def _enter(self, make: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        entered: asyncio.Future[T] = self._loop.create_future()
        leave = asyncio.Event()
        task = self._loop.create_task(
            self._hold(make, entered, leave), name=f"asynckv: {self.name}: holder"
        )
        either: set[asyncio.Future[Any]] = {task, entered}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        if not entered.done():
            await task  # raises what entering raised

        async def end() -> None:
            leave.set()
            await task

        self.at_end(end)
        return entered.result()

    async def _hold(
        self,
        make: Callable[[], AbstractAsyncContextManager[T]],
        entered: asyncio.Future[T],
        leave: asyncio.Event,
    ) -> None:
        async with make() as value:
            entered.set_result(value)
            await leave.wait()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"{self.name} is shut down")

    def _check_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise WrongLoop(
                f"the loop of {self.name} would wait for itself",
                hint="on the loop, await instead",
            )
