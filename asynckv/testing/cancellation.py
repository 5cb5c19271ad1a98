"""The cancellation sweep: cancel an operation at each of its suspensions.

It counts what the coroutine yields to the event loop, so that "its third
suspension" is exact, and never sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import math
import types
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Sequence,
)
from types import CodeType, FrameType
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

import anyio

__all__ = (
    "CancelMode",
    "Outcome",
    "Round",
    "SweepCounts",
    "frames_of",
    "sweep_cancellation",
    "trail",
    "where",
)


def frames_of(coroutine: object) -> Iterator[FrameType]:
    """Yield the frames in which it is suspended, from the outermost call inwards."""
    inner: object = coroutine
    while inner is not None:
        if (frame := _attribute(inner, "frame")) is not None:
            yield frame
        awaited = _attribute(inner, "await")
        if awaited is not None and not isinstance(awaited, asyncio.Future):
            awaited = _unwrapped(awaited)
        inner = awaited


def where(coroutine: object) -> str:
    """Name the innermost place where it is suspended, ``"?"`` if it does not tell."""
    frames = list(frames_of(coroutine))
    if not frames:
        return "?"
    return f"{frames[-1].f_code.co_qualname} (line {frames[-1].f_lineno})"


def trail(coroutine: object) -> list[str]:
    """Name each place where it is suspended, from the outermost call inwards."""
    return [
        f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        for frame in frames_of(coroutine)
    ]


def _unwrapped(awaited: object) -> object:
    """What ``__await__`` and ``anext`` return hides what it runs."""
    if _attribute(awaited, "frame") is None:
        for inner in gc.get_referents(awaited):
            if _attribute(inner, "frame") is not None:
                return inner
    return awaited


def _attribute(coroutine: object, name: Literal["frame", "await"]) -> Any:
    of_generators = {"frame": "gi_frame", "await": "gi_yieldfrom"}[name]
    for attribute in (f"cr_{name}", f"ag_{name}", of_generators):
        if (value := getattr(coroutine, attribute, None)) is not None:
            return value
    return None


_T = TypeVar("_T")
_GRACE_S: Final = 1.0

CancelMode: TypeAlias = Literal["task", "scope", "timeout", "again", "completion"]
"""How a round is cancelled.

``"task"``: by ``task.cancel()``. ``"scope"``: by an :class:`anyio.CancelScope`
that expires, which cancels every further ``await`` too. ``"timeout"``: by an
:func:`asyncio.timeout` that expires, on the next tick. ``"again"``: by
``task.cancel()``, and once more at each further suspension. ``"completion"``: by
``task.cancel()`` in the tick in which what it waits for is done, before it has
woken up.
"""


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[_T]):
    """How one round ended: cancelled, or with a value all the same."""

    cancelled: bool
    value: _T | None = None


@dataclasses.dataclass(frozen=True)
class SweepCounts:
    """What a sweep saw. ``rounds`` is ``cancelled + completed``.

    ``suspensions`` is the highest suspension at which a round was cancelled.
    ``completed`` counts the rounds whose cancellation came too late, and the
    one at the end of each mode that was not cancelled at all.
    """

    rounds: int = 0
    cancelled: int = 0
    completed: int = 0
    suspensions: int = 0


async def sweep_cancellation(
    factory: Callable[[], Coroutine[Any, Any, _T]],
    check: Callable[[int, CancelMode, Outcome[_T]], Awaitable[object]],
    *,
    before: Callable[[], Awaitable[object]] | None = None,
    modes: Sequence[CancelMode] = ("task", "scope"),
    round_timeout_s: float = 10.0,
    max_suspensions: int = 1000,
) -> SweepCounts:
    """Cancel a fresh coroutine at its first suspension, its second, and so on.

    Each round awaits ``before()``, runs ``factory()`` in a task of its own,
    cancels it at suspension ``k`` and awaits ``check(k, mode, outcome)``; ``k``
    is 0 for a task that is cancelled before it starts (mode ``"task"`` only). A
    mode ends with the first round that finishes before its ``k`` is reached.
    Whatever ``before``, the coroutine or ``check`` raises is raised here, with
    a note that names the round.

    Cancelling the sweep cancels its round.

    :raises TimeoutError: a round, or its check, took longer than
        ``round_timeout_s``; the message says where it waits
    :raises RuntimeError: there are more than ``max_suspensions`` suspensions
    """
    counts = SweepCounts()
    for mode in modes:
        for k in range(0 if mode == "task" else 1, max_suspensions + 1):
            round_ = Round(mode, k, timeout_s=round_timeout_s)
            try:
                outcome = await round_.run(factory, check, before)
            except BaseException as exc:
                exc.add_note(f"in the sweep: {round_}")
                raise
            counts = _counted(counts, k, outcome, was_cancelled=round_.has_fired)
            if not round_.has_fired:
                break
        else:
            raise RuntimeError(f"more than {max_suspensions} suspensions by {mode}")
    return counts


def _counted(
    counts: SweepCounts, k: int, outcome: Outcome[Any], *, was_cancelled: bool
) -> SweepCounts:
    return SweepCounts(
        rounds=counts.rounds + 1,
        cancelled=counts.cancelled + outcome.cancelled,
        completed=counts.completed + (not outcome.cancelled),
        suspensions=max(counts.suspensions, k if was_cancelled else 0),
    )


class Round:
    """One fresh coroutine, cancelled at suspension ``k``, or ``ticks`` later.

    ``has_fired`` tells that it was cancelled, ``suspensions`` how often it has
    suspended, and ``places`` the code it was in when it was cancelled.
    """

    def __init__(
        self, mode: CancelMode, k: int, *, ticks: int = 0, timeout_s: float = 10.0
    ) -> None:
        self.mode: CancelMode = mode
        self.k = k
        self.ticks = ticks
        self.has_fired = False
        self.suspensions = 0
        self.places: tuple[CodeType, ...] = ()
        self._timeout_s = timeout_s
        self._is_over = False

    def __str__(self) -> str:
        verb = "cancelled" if self.has_fired else "to be cancelled"
        late = f" and {self.ticks} ticks" if self.ticks else ""
        return f"{verb} by {self.mode!r} at suspension {self.k}{late}"

    async def run(
        self,
        factory: Callable[[], Coroutine[Any, Any, _T]],
        check: Callable[[int, CancelMode, Outcome[_T]], Awaitable[object]],
        before: Callable[[], Awaitable[object]] | None = None,
    ) -> Outcome[_T]:
        """Do one round as :func:`sweep_cancellation` does them.

        :raises TimeoutError: a step took longer than ``timeout_s``
        """
        if before is not None:
            async with self._limit("before()"):
                await before()
        outcome = await self._operate(factory())
        async with self._limit("check()"):
            await check(self.k, self.mode, outcome)
        return outcome

    async def _operate(self, coroutine: Coroutine[Any, Any, _T]) -> Outcome[_T]:
        """Run the coroutine in a task, cancel it at ``k``, and wait for its end."""
        run = {"scope": self._in_scope, "timeout": self._in_timeout}.get(
            self.mode, self._in_task
        )
        task = asyncio.create_task(run(coroutine), name=f"round {self.k}")
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
            if not task.done():
                raise TimeoutError(f"still waits in {where(coroutine)}: {self}")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_GRACE_S)
        if task.cancelled():
            with contextlib.suppress(asyncio.CancelledError):
                task.result()  # the task keeps it else: a cycle, and memory in frames
            if self.has_fired:
                return Outcome(cancelled=True)
            raise RuntimeError(f"cancelled by somebody else: {self}")
        return task.result()

    async def _in_task(self, coroutine: Coroutine[Any, Any, _T]) -> Outcome[_T]:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a round runs in a task")
        value = await self._drive(coroutine, task.cancel)
        return Outcome(cancelled=False, value=value)

    async def _in_scope(self, coroutine: Coroutine[Any, Any, _T]) -> Outcome[_T]:
        with anyio.CancelScope() as scope:

            def expire() -> None:
                scope.deadline = -math.inf

            value = await self._drive(coroutine, expire)
            return Outcome(cancelled=False, value=value)
        return Outcome(cancelled=True)

    async def _in_timeout(self, coroutine: Coroutine[Any, Any, _T]) -> Outcome[_T]:
        loop = asyncio.get_running_loop()
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                value = await self._drive(
                    coroutine, lambda: timeout.reschedule(loop.time())
                )
                return Outcome(cancelled=False, value=value)
        except TimeoutError:
            if not timeout.expired():
                raise
        return Outcome(cancelled=True)

    @types.coroutine
    def _drive(
        self, coroutine: Coroutine[Any, Any, _T], cancel: Callable[[], object]
    ) -> Generator[Any, Any, _T]:
        """Await the coroutine, and look at each of its suspensions.

        What it yields to the event loop is passed on untouched.
        """
        error: BaseException | None = None
        if self.k == 0:  # what the event loop throws into a task before it starts
            self.has_fired, error = True, asyncio.CancelledError()
        while True:
            try:
                if error is None:
                    awaited = coroutine.send(None)
                else:
                    awaited = coroutine.throw(error)
            except StopIteration as stop:
                self._is_over = True
                value: _T = stop.value
                return value
            except BaseException:
                self._is_over = True
                error = None  # its traceback holds this frame, and others hold memory
                raise
            self._look_at_suspension(coroutine, awaited, cancel)
            error = None
            try:
                yield awaited
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as exc:  # noqa: BLE001 - thrown in where it belongs
                error = exc

    def _look_at_suspension(
        self, coroutine: object, awaited: object, cancel: Callable[[], object]
    ) -> None:
        """Cancel now, or when what is awaited is done, if this is suspension ``k``."""
        self.suspensions += 1
        if self.mode == "again" and self.has_fired:
            cancel()
        if self.suspensions != self.k:
            return
        fire = functools.partial(self._fire, coroutine, cancel)
        if self.mode == "completion" and isinstance(awaited, asyncio.Future):
            # First of its callbacks: the task itself has not added its own yet.
            awaited.add_done_callback(lambda _: fire())
        else:
            _after(self.ticks, fire)

    def _fire(self, coroutine: object, cancel: Callable[[], object]) -> None:
        if not self._is_over:
            self.has_fired = True
            self.places = tuple(frame.f_code for frame in frames_of(coroutine))
            cancel()

    @contextlib.asynccontextmanager
    async def _limit(self, what: str) -> AsyncIterator[None]:
        """As ``asyncio.timeout``, with a message."""
        try:
            async with asyncio.timeout(self._timeout_s) as timeout:
                yield
        except TimeoutError as exc:
            if timeout.expired():
                raise TimeoutError(f"{what} does not return: {self}") from exc
            raise


def _after(ticks: int, fire: Callable[[], object]) -> None:
    """Call ``fire`` so many ticks from now, 0 being at once."""
    if ticks:
        asyncio.get_running_loop().call_soon(_after, ticks - 1, fire)
    else:
        fire()
