"""Waiting, written once: in line, for a reply or a change, for tasks to end, and past
a cancellation.

A line is one Condition with FIFO tickets: who is next, and what it gets, is decided by
plain functions. A cancelled wait takes nobody's turn; one that is shielded holds the
cancellation back until memory is quiet, be it ``task.cancel()``, also when that is
repeated, or a cancelled anyio scope, which cancels every ``await`` below it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import math
import traceback
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Hashable,
    Iterator,
)
from typing import Any, Final, Generic, TypeVar

import anyio

# The first scope would import it, on a running loop: 16 ms.
import anyio._backends._asyncio

from asynckv.observability.waits import LoggedWait

__all__ = (
    "ByteRoom",
    "FairQueue",
    "OwnTasks",
    "PlainTaskGroup",
    "Reply",
    "Waits",
    "Watchers",
    "clear_all_frames",
    "in_turns",
    "wait_or_stop",
    "wait_shielded",
)


T = TypeVar("T")
H = TypeVar("H", bound=Hashable)

_AT_A_TIME: Final = 64
"""So many of those who wait for a change look in one turn of the loop."""


class FairQueue(Generic[H]):
    """``give(ticket)`` says whether the first one is through with waiting.

    Be it that it got what it waits for, or that it never will. If not, nobody behind
    it gets anything. Who ``passes`` keeps its place, and holds nobody up meanwhile.
    """

    def __init__(
        self,
        give: Callable[[H], bool],
        passes: Callable[[H], bool] = lambda ticket: False,
    ) -> None:
        self._give = give
        self._passes = passes
        # Of a dict the first is dear to find once many before it have left.
        self._tickets: collections.OrderedDict[H, float] = collections.OrderedDict()
        self._condition = asyncio.Condition()
        self._waiting = self._to_notify = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._notifying: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """How many are in line."""
        return len(self._tickets)

    def __contains__(self, ticket: object) -> bool:
        return ticket in self._tickets

    def __iter__(self) -> Iterator[H]:
        """Yield those in line, the first one first."""
        return iter(self._tickets)

    def longest_wait_s(self, now_s: float) -> float:
        """How long the first one that holds others up has waited."""
        first = self._first()
        return 0.0 if first is None else now_s - self._tickets[first]

    def join(self, ticket: H) -> bool:
        """Get in line, as the last; ``True`` if it is through at once."""
        is_alone = not self._tickets
        if is_alone and self._give(ticket):
            return True
        self._tickets[ticket] = asyncio.get_running_loop().time()
        if not is_alone:
            self.advance()
        return ticket not in self._tickets

    def quit(self, ticket: H) -> bool:
        """Leave the line. ``False`` if it is not in it: it is through."""
        if self._tickets.pop(ticket, None) is None:
            return False
        self.change()
        return True

    def advance(self) -> None:
        """Give to the first, and to the next, while there is something to give."""
        while (first := self._first()) is not None and self._give(first):
            self._tickets.pop(first, None)

    def change(self) -> None:
        """There may be more to give, or else something has changed. Never waits."""
        if self._tickets:
            self.advance()
        # A Condition is notified under its lock, which a plain function cannot take.
        self._to_notify = self._waiting
        loop = self._loop if self._waiting else None
        if loop is None or loop.is_closed():
            return
        if self._notifying is None or self._notifying.done():
            self._notifying = loop.create_task(
                self._notify(), name="asynckv: a line has changed"
            )

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait until ``predicate()`` is true. A cancelled call leaves no trace."""
        if predicate():
            return
        self._loop = asyncio.get_running_loop()
        self._waiting += 1
        try:
            async with self._condition:
                await self._condition.wait_for(predicate)
        finally:
            self._waiting -= 1

    async def until_through(
        self, ticket: H, who: str, what: str, ends_with: str
    ) -> None:
        """Wait, and log it, until a ticket is through.

        Cancelled, it may be in line still, or be through: whoever cancels calls
        :meth:`quit`, and gives back what it got if that says so.
        """
        with LoggedWait(who, what, ends_with):
            await self.until(lambda: ticket not in self._tickets)

    async def aclose(self) -> None:
        """Wait for the last notification."""
        if self._notifying is not None:
            await asyncio.wait({self._notifying})

    def _first(self) -> H | None:
        for ticket in self._tickets:
            if not self._passes(ticket):
                return ticket
        return None

    async def _notify(self) -> None:
        while self._to_notify > 0:
            self._to_notify -= _AT_A_TIME
            async with self._condition:
                self._condition.notify(_AT_A_TIME)
            await asyncio.sleep(0)  # others have their turn


class _Claim:
    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class ByteRoom:
    """``max_bytes`` for all; who wants more than that gets them when all are free.

    Logs say that ``who`` waits for ``what``, and that ``ends_with`` ends it.
    """

    def __init__(self, max_bytes: int, *, who: str, what: str, ends_with: str) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._line: FairQueue[_Claim] = FairQueue(self._give)
        self._logged = (who, what, ends_with)

    async def take(self, nbytes: int) -> None:
        """Take ``nbytes``, behind those who asked before.

        A cancelled call leaves no trace.
        """
        claim = _Claim(nbytes)
        if self._line.join(claim):
            return
        who, what, ends_with = self._logged
        try:
            await self._line.until_through(
                claim, f"{who} of {nbytes} bytes", what, ends_with
            )
        except BaseException:
            if not self._line.quit(claim):
                self.release(nbytes)  # it was given in the same tick
            raise

    def release(self, nbytes: int) -> None:
        """Give bytes back. Never waits."""
        self.used_bytes -= nbytes
        self._line.change()

    def _give(self, claim: _Claim) -> bool:
        if self.used_bytes and self.used_bytes + claim.nbytes > self.max_bytes:
            return False
        self.used_bytes += claim.nbytes
        return True


class Reply(Generic[T]):
    """One answer, awaited by one task, or by none any more. The first one counts."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def __await__(self) -> Generator[Any, None, T]:
        return self._future.__await__()

    @property
    def is_in(self) -> bool:
        """Whether it came, or is not awaited any more."""
        return self._future.done()

    @property
    def is_given_up(self) -> bool:
        """Whether who awaited it was cancelled: it may still come."""
        return self._future.cancelled()

    def give(self, value: T) -> None:
        """That is the answer. Never waits."""
        if not self._future.done():
            self._future.set_result(value)

    def fail(self, error: Exception) -> None:
        """There will be none. Never waits."""
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # it may be that nobody awaits it

    def check(self) -> None:
        """Raise what it failed by, if it has failed. Never waits."""
        if self._future.done() and not self._future.cancelled():
            self._future.result()


class Watchers:
    """Futures of those who wait for the next change of one object.

    Of ten thousand objects each has one who waits: he costs no list.
    """

    __slots__ = ("_first", "_others")

    def __init__(self) -> None:
        self._first: asyncio.Future[None] | None = None
        self._others: list[asyncio.Future[None]] | None = None

    def next_change(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Return what is done when the object has changed; look at it then."""
        # The loop is known to who waits; asked of asyncio it costs a system call.
        future: asyncio.Future[None] = loop.create_future()
        if self._first is None or self._first.done():  # he was cancelled
            self._first = future
        elif self._others is None:
            self._others = [future]
        else:
            self._others.append(future)
        return future

    def __len__(self) -> int:
        """How many wait."""
        every = (self._first, *(self._others or ()))
        return sum(future is not None and not future.done() for future in every)

    def wake(self) -> None:
        """The object has changed. Never waits."""
        first, others = self._first, self._others
        if first is None:
            return  # nor is there any other
        self._first = self._others = None
        if not first.done():
            first.set_result(None)
        for future in others or ():
            if not future.done():
                future.set_result(None)


class Waits:
    """Those of one object, each for something of its own that is over some time.

    One future a wait; :meth:`settle` looks at all of them. On the loop only.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waits: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    async def wait(
        self, is_over: Callable[[], bool], *, timeout_s: float | None
    ) -> None:
        """Wait until ``is_over()``. Within ``timeout_s`` it is shielded; else not."""
        if is_over():
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._waits.append((is_over, future))
        if timeout_s is None:
            await future
        else:
            await wait_shielded(future, timeout_s=timeout_s)

    def settle(self) -> None:
        """Something has changed."""
        waits, self._waits = self._waits, []
        for is_over, future in waits:
            if future.done():
                continue
            if is_over():
                future.set_result(None)
            else:
                self._waits.append((is_over, future))


def in_turns(steps: Iterator[None]) -> None:
    """Take one step now, and one in each turn of the loop from here on. Never waits.

    Where no loop runs all are taken now.
    """
    for _ in steps:
        with contextlib.suppress(RuntimeError):  # that none runs
            asyncio.get_running_loop().call_soon(in_turns, steps)
            return


_LONG_S: Final = 3600.0


async def wait_shielded(
    future: asyncio.Future[T], *, timeout_s: float | None = None
) -> None:
    """Wait until ``future`` is done; a cancellation is delivered after that.

    Waits for ``timeout_s`` at most, and says nothing when that is over. Without
    it only for futures that are sure to be done within bounded time.
    """
    loop = asyncio.get_running_loop()
    end = math.inf if timeout_s is None else loop.time() + timeout_s
    held_back: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not future.done() and (left_s := end - loop.time()) > 0:
            try:
                await asyncio.wait({future}, timeout=min(left_s, _LONG_S))
            except asyncio.CancelledError as exc:
                held_back = exc
    if held_back is not None:
        try:
            raise held_back
        finally:
            # Its traceback holds this frame, and the frames hold memory.
            held_back = None


async def wait_or_stop(future: asyncio.Future[T], stop: Callable[[], None]) -> None:
    """Wait until ``future`` is done; a cancellation calls ``stop`` first.

    ``stop`` makes ``future`` be done soon, and the cancellation is delivered
    then. It is called too if the coroutine is closed while it waits.
    """
    try:
        await asyncio.wait({future})
    except asyncio.CancelledError:
        stop()
        await wait_shielded(future)
        raise
    except GeneratorExit:
        stop()
        raise


def clear_all_frames(error: BaseException) -> None:
    """Let go of what an error's frames hold: its own, its cause's, and its context's.

    Those of a group's members too. Memory that they refer to would be kept as long as
    somebody keeps the error. A frame that is running, or suspended, keeps what it has:
    it may be that of another task, which has caught one of the errors and goes on.
    """
    seen, left = set[int](), [error]
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            _clear_frames(one)
            left += [x for x in (one.__cause__, one.__context__) if x is not None]
            if isinstance(one, BaseExceptionGroup):
                left += one.exceptions


def _clear_frames(error: BaseException) -> None:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # Until 3.12 clear() closes the suspended coroutine of a frame. CPython tracks
        # a frame from when it is over: until then its stack, or coroutine, owns it.
        if gc.is_tracked(frame):
            frame.clear()


def _raise(error: Exception) -> None:
    raise error


class OwnTasks:
    """``failed`` is told, on the loop, what a task has failed of.

    That error keeps nothing of what the task had in hand. ``all_ended`` is called each
    time that the last of them has ended. They are of those of ``within``, too.
    """

    def __init__(
        self,
        failed: Callable[[Exception], None] = _raise,
        all_ended: Callable[[], None] = lambda: None,
        within: OwnTasks | None = None,
    ) -> None:
        self.all_ended = all_ended
        self._within = within
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._tasks)

    def start(
        self, work: Callable[[], Awaitable[object]], name: str
    ) -> asyncio.Task[None]:
        """Begin ``work``; it is cancelled by :meth:`cancel` at the latest."""
        return self.own(self._try(work), name)

    def own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """As :meth:`start`; but what it fails of is told by the task alone."""
        if self._within is not None:
            task = self._within.own(work, name)
        else:
            task = asyncio.get_running_loop().create_task(work, name=name)
        return self.adopt(task)

    def adopt(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Let a task that another one owns be one of these, too."""
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def cancel(self) -> None:
        """Cancel all of them. Never waits."""
        for task in self._tasks:
            task.cancel()

    async def wait(self) -> None:
        """Wait until all have ended. A cancelled call leaves no trace."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def quiesce(self) -> None:
        """Cancel all of them, and wait until they have ended (shielded).

        As long as the slowest of them takes to let go.
        """
        self.cancel()
        ended = asyncio.gather(*self._tasks, return_exceptions=True)
        await wait_shielded(ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self.all_ended()

    async def _try(self, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except Exception as exc:  # noqa: BLE001 - whoever waits for it is told
            clear_all_frames(exc)
            self._failed(exc)


class PlainTaskGroup(asyncio.TaskGroup):
    """Raises the first error of its tasks as it is, not within a group of errors."""

    async def __aexit__(self, *exc_info: Any) -> None:
        try:
            await super().__aexit__(*exc_info)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
