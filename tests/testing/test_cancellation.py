from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, get_args

import anyio
import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.testing.blocked import until_blocked
from asynckv.testing.cancellation import (
    CancelMode,
    Outcome,
    Round,
    frames_of,
    sweep_cancellation,
    trail,
    where,
)


async def wait_for_ever() -> None:
    await asyncio.get_running_loop().create_future()


async def count() -> AsyncIterator[int]:
    await wait_for_ever()
    yield 1


async def iterate() -> None:
    async for _ in count():
        pass


@asynccontextmanager
async def opened() -> AsyncIterator[None]:
    await wait_for_ever()
    yield


async def enter() -> None:
    async with opened():
        pass


async def select() -> None:
    async with LookupBuffer(100, drain_s=0) as buffer:
        await buffer.drop_select([1])


async def blocked_in(coroutine: Coroutine[Any, Any, None]) -> list[str]:
    """Return where it waits, from the outside in, and cancel it."""
    task = asyncio.create_task(coroutine)
    await until_blocked(task)
    names = [frame.f_code.co_qualname for frame in frames_of(coroutine)]
    assert where(coroutine).startswith(f"{names[-1]} (line ")
    assert trail(coroutine)[-1].endswith(f" in {names[-1]}")
    task.cancel()
    await asyncio.wait({task})
    assert where(coroutine) == where(object()) == "?"
    return names


async def test_it_looks_through_generators_managers_and_awaited_objects() -> None:
    assert await blocked_in(iterate()) == ["iterate", "count", "wait_for_ever"]
    assert (await blocked_in(enter()))[2:] == ["opened", "wait_for_ever"]
    assert "LocalConsumer.take" in await blocked_in(select())


pytestmark = pytest.mark.both_loops


async def three_suspensions() -> str:
    for _ in range(3):
        await asyncio.sleep(0)
    return "done"


async def look_away(k: int, mode: CancelMode, outcome: Outcome[Any]) -> None:
    """Check nothing."""


async def test_cancels_at_every_suspension_and_then_lets_it_finish() -> None:
    seen: list[tuple[int, CancelMode, bool, str | None]] = []

    async def check(k: int, mode: CancelMode, outcome: Outcome[str]) -> None:
        seen.append((k, mode, outcome.cancelled, outcome.value))

    await sweep_cancellation(three_suspensions, check, modes=["task"])
    cancelled = [(k, "task", True, None) for k in range(4)]
    assert seen == [*cancelled, (4, "task", False, "done")]


async def test_a_scope_cancels_every_later_await_too() -> None:
    awaits_in_finally: list[bool] = []

    async def operation() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                awaits_in_finally.append(True)

    async def stop_after_first(
        k: int, mode: CancelMode, outcome: Outcome[None]
    ) -> None:
        assert outcome.cancelled
        raise StopAsyncIteration

    with pytest.raises(StopAsyncIteration):
        await sweep_cancellation(operation, stop_after_first, modes=["scope"])
    assert awaits_in_finally == [True]


async def test_completion_cancels_between_the_result_and_the_wake_up() -> None:
    handed_over: list[asyncio.Future[str]] = []

    async def operation() -> str:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        handed_over.append(future)
        asyncio.get_running_loop().call_soon(future.set_result, "entry")
        return await future

    counts = await sweep_cancellation(operation, look_away, modes=["completion"])
    assert (counts.cancelled, counts.completed) == (1, 1)
    assert [future.result() for future in handed_over] == ["entry", "entry"]


async def test_before_is_awaited_for_each_round() -> None:
    prepared: list[None] = []

    async def before() -> None:
        prepared.append(None)

    counts = await sweep_cancellation(three_suspensions, look_away, before=before)
    assert len(prepared) == counts.rounds


async def test_cancelling_the_sweep_cancels_its_round() -> None:
    started = asyncio.Event()
    ended: list[bool] = []

    async def operation() -> None:
        try:
            started.set()
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(True)

    sweep = sweep_cancellation(operation, look_away, modes=["completion"])
    task = asyncio.create_task(sweep)
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_the_error_of_a_check_names_its_round() -> None:
    async def check(k: int, mode: CancelMode, outcome: Outcome[str]) -> None:
        assert k < 2

    with pytest.raises(AssertionError) as caught:
        await sweep_cancellation(three_suspensions, check)
    assert caught.value.__notes__ == [
        "in the sweep: cancelled by 'task' at suspension 2"
    ]


Operation = Callable[[], Coroutine[Any, Any, Any]]


class Deferred(Coroutine[Any, Any, str]):
    """A coroutine that is an object, and starts its work when it is first sent to."""

    def __init__(self) -> None:
        self._inner: Coroutine[Any, Any, str] | None = None

    def send(self, value: Any) -> Any:
        self._inner = self._inner or three_suspensions()
        return self._inner.send(value)

    def throw(
        self,
        typ: Any,
        val: BaseException | object | None = None,
        tb: TracebackType | None = None,
    ) -> Any:
        if self._inner is None:
            raise typ
        return self._inner.throw(typ)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()

    def __await__(self) -> Generator[Any, Any, str]:
        raise NotImplementedError


async def swallow() -> str:
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        return "too late"
    return "in time"


@pytest.mark.parametrize(
    ("operation", "modes", "counts"),
    [
        (three_suspensions, ["task"], (5, 4, 1, 3)),
        (Deferred, ["task", "scope"], (9, 7, 2, 3)),
        (swallow, ["task"], (3, 1, 2, 1)),
        # It cancels one tick later.
        (three_suspensions, ["timeout"], (4, 3, 1, 3)),
    ],
)
async def test_rounds_are_counted_by_how_they_end(
    operation: Operation, modes: list[CancelMode], counts: tuple[int, int, int, int]
) -> None:
    found = await sweep_cancellation(operation, look_away, modes=modes)
    ended = (found.rounds, found.cancelled, found.completed, found.suspensions)
    assert ended == counts


async def hang() -> None:
    release = asyncio.Event()
    while not release.is_set():
        try:
            await release.wait()
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(0.05, release.set)


async def end_otherwise() -> None:
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        raise ValueError("not what was asked") from None


async def time_out() -> None:
    raise TimeoutError("its own")


async def check_for_ever(k: int, mode: CancelMode, outcome: Outcome[Any]) -> None:
    await wait_for_ever()


@pytest.mark.parametrize(
    ("operation", "check", "options", "error", "match"),
    [
        (
            hang,
            look_away,
            {"modes": ["task"], "round_timeout_s": 0.01},
            TimeoutError,
            "wait",
        ),
        (
            three_suspensions,
            check_for_ever,
            {"round_timeout_s": 0.01},
            TimeoutError,
            r"check\(\) does not return",
        ),
        (end_otherwise, look_away, {}, ValueError, "not what was asked"),
        (
            three_suspensions,
            look_away,
            {"max_suspensions": 2},
            RuntimeError,
            "more than 2 suspensions",
        ),
        (time_out, look_away, {"modes": ["timeout"]}, TimeoutError, "its own"),
    ],
    ids=["it hangs", "its check hangs", "another error", "too long", "its own timeout"],
)
async def test_what_does_not_end_as_it_was_cancelled_is_reported(
    operation: Operation,
    check: Any,
    options: dict[str, Any],
    error: type[Exception],
    match: str,
) -> None:
    with pytest.raises(error, match=match):
        await sweep_cancellation(operation, check, **options)


async def test_a_cancelled_sweep_scope_is_not_swallowed() -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await sweep_cancellation(three_suspensions, look_away)
    assert scope.cancelled_caught


async def test_again_cancels_also_while_it_cleans_up() -> None:
    cancelled: list[int] = []

    async def operation() -> None:
        for number in range(4):
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                cancelled.append(number)

    await Round("again", 1).run(operation, look_away)
    assert cancelled == [0, 1, 2, 3]


async def test_a_round_may_cancel_some_ticks_later() -> None:
    round_ = Round("task", 1, ticks=2)
    assert (await round_.run(three_suspensions, look_away)).cancelled
    assert (round_.has_fired, round_.suspensions) == (True, 2)
    assert round_.places[0] is three_suspensions.__code__


async def test_a_round_that_is_over_before_its_ticks_is_not_cancelled() -> None:
    round_ = Round("task", 3, ticks=5)
    outcome = await round_.run(three_suspensions, look_away)
    assert (outcome.value, round_.has_fired) == ("done", False)


class Held(set[str]):
    """Anything that can be referred to."""


@pytest.mark.parametrize("mode", get_args(CancelMode))
async def test_nothing_is_kept_of_what_was_cancelled(
    mode: CancelMode, request: pytest.FixtureRequest
) -> None:
    held: list[weakref.ref[set[str]]] = []

    async def hold() -> None:
        value = Held()
        held.append(weakref.ref(value))
        await asyncio.sleep(0)

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        assert outcome.cancelled and held[0]() is None

    gc.disable()
    request.addfinalizer(gc.enable)
    await Round(mode, 1).run(hold, check)
