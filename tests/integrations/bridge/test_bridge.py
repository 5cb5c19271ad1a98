from __future__ import annotations

import asyncio
import logging
import math
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from asynckv.errors import WrongLoop
from asynckv.integrations.bridge import Bridge


@pytest.fixture
def bridge() -> Iterator[Bridge[str]]:
    bridge = Bridge[str]("test")
    yield bridge
    bridge.shutdown()


def test_what_is_told_on_the_loop_is_news_to_the_engine_once(
    bridge: Bridge[str],
) -> None:
    async def tell() -> None:
        bridge.tell("first")
        bridge.tell("second")

    bridge.run(tell, timeout_s=5)
    assert bridge.news() == ["first", "second"]
    assert bridge.news() == []


def test_nothing_of_a_step_waits_for_a_loop_that_is_stuck(bridge: Bridge[str]) -> None:
    stuck, go_on = threading.Event(), threading.Event()

    def block() -> None:
        stuck.set()
        _spin(go_on)

    async def idle() -> None:
        bridge.tell("ran")

    bridge.call(block)
    assert stuck.wait(5)
    bridge.start(idle)
    assert bridge.news() == []
    go_on.set()
    bridge.run(asyncio.sleep, 0, timeout_s=5)
    assert bridge.news() == ["ran"]


def test_calls_come_in_the_order_in_which_they_were_made(bridge: Bridge[str]) -> None:
    for number in range(100):
        bridge.call(bridge.tell, str(number))
    bridge.run(asyncio.sleep, 0, timeout_s=5)
    assert bridge.news() == [str(number) for number in range(100)]


def test_run_returns_the_result_and_raises_the_error(bridge: Bridge[str]) -> None:
    async def fail() -> None:
        raise KeyError("this")

    async def answer() -> int:
        return 42

    assert bridge.run(answer, timeout_s=5) == 42
    with pytest.raises(KeyError, match="this"):
        bridge.run(fail, timeout_s=5)


def test_run_cancels_what_takes_too_long(bridge: Bridge[str]) -> None:
    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            bridge.tell("cancelled")

    with pytest.raises(TimeoutError):
        bridge.run(forever, timeout_s=0.01)
    assert bridge.news() == ["cancelled"]


@pytest.mark.parametrize("timeout_s", [math.nan, -1])
def test_run_begins_nothing_for_a_time_that_is_none(
    bridge: Bridge[str], timeout_s: float
) -> None:
    async def tell() -> None:
        bridge.tell("ran")

    with pytest.raises(ValueError, match="timeout_s is a number of seconds"):
        bridge.run(tell, timeout_s=timeout_s)
    bridge.run(asyncio.sleep, 0, timeout_s=math.inf)
    assert bridge.news() == []


def test_an_error_that_gets_out_of_a_task_is_logged(
    bridge: Bridge[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise KeyError("this")

    with caplog.at_level(logging.ERROR):
        bridge.start(fail)
        bridge.shutdown()
    assert "fail failed" in caplog.text
    assert "KeyError" in caplog.text


def test_the_loop_is_refused_to_wait_for_itself(bridge: Bridge[str]) -> None:
    async def wait() -> None:
        bridge.run(asyncio.sleep, 0, timeout_s=5)

    async def end() -> None:
        bridge.shutdown()

    for function in (wait, end):
        with pytest.raises(WrongLoop, match="wait for itself"):
            bridge.run(function, timeout_s=5)


def test_shutdown_cancels_tasks_before_it_leaves_what_was_entered() -> None:
    bridge = Bridge[str]("test")

    @asynccontextmanager
    async def resource(name: str) -> AsyncIterator[str]:
        yield name
        bridge.tell(f"left {name}")

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            bridge.tell("cancelled")

    assert bridge.enter(lambda: resource("a"), timeout_s=5) == "a"
    assert bridge.enter(lambda: resource("b"), timeout_s=5) == "b"
    bridge.start(forever)
    bridge.run(asyncio.sleep, 0, timeout_s=5)
    bridge.shutdown()
    assert bridge.news() == ["cancelled", "left b", "left a"]


def test_what_is_to_be_called_at_the_end_is_called_even_if_another_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bridge = Bridge[str]("test")

    async def end() -> None:
        bridge.tell("ended")

    async def fail() -> None:
        raise KeyError("this")

    bridge.at_end(end)
    bridge.at_end(fail)
    bridge.shutdown()
    assert bridge.news() == ["ended"]
    assert "test did not end cleanly" in caplog.text


def test_shutdown_joins_the_thread_and_may_be_called_again() -> None:
    bridge = Bridge[str]("to be joined")
    names = [thread.name for thread in threading.enumerate()]
    assert "asynckv: to be joined" in names
    bridge.shutdown()
    bridge.shutdown()
    assert bridge.is_closed
    names = [thread.name for thread in threading.enumerate()]
    assert "asynckv: to be joined" not in names


def test_shutdown_ends_a_run_of_another_thread() -> None:
    bridge, waiting = Bridge[str]("test"), threading.Event()
    errors: list[BaseException] = []

    async def forever() -> None:
        waiting.set()
        await asyncio.Event().wait()

    def run() -> None:
        try:
            bridge.run(forever, timeout_s=30)
        except RuntimeError as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    assert waiting.wait(5)
    bridge.shutdown()
    thread.join(5)
    assert "shut down meanwhile" in str(errors[0])


def test_shutdown_gives_up_on_a_loop_that_is_stuck(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bridge, go_on = Bridge[str]("stuck"), threading.Event()
    bridge.call(_spin, go_on)
    bridge.shutdown(timeout_s=0.01)
    assert "stuck did not end within 0.01 s" in caplog.text
    go_on.set()
    bridge.shutdown()


def test_a_closed_bridge_refuses_work() -> None:
    bridge = Bridge[str]("test")
    bridge.shutdown()
    with pytest.raises(RuntimeError, match="test is shut down"):
        bridge.call(print)
    with pytest.raises(RuntimeError, match="test is shut down"):
        bridge.run(asyncio.sleep, 0, timeout_s=5)
    assert bridge.news() == []


def test_what_cannot_be_entered_raises_and_is_not_held(bridge: Bridge[str]) -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        raise KeyError("this")
        yield

    @asynccontextmanager
    async def endless() -> AsyncIterator[None]:
        try:
            await asyncio.Event().wait()
            yield
        finally:
            bridge.tell("given up")

    with pytest.raises(KeyError, match="this"):
        bridge.enter(broken, timeout_s=5)
    with pytest.raises(TimeoutError):
        bridge.enter(endless, timeout_s=0.01)
    assert bridge.news() == ["given up"]


def test_importing_it_starts_nothing() -> None:
    code = (
        "import threading, asynckv.integrations.bridge;"
        "import sys; assert threading.active_count() == 1;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def _spin(go_on: threading.Event) -> None:
    """Keep the loop busy until then."""
    while not go_on.is_set():
        pass
