from __future__ import annotations

import asyncio
import threading

import anyio
import pytest

from asynckv.integrations.transformers.forward import Forward


async def test_the_call_runs_in_a_thread_of_its_own() -> None:
    forward = Forward(threading.get_ident, lambda: None, name="a forward")
    assert await forward.wait() == forward.thread.ident != threading.get_ident()
    assert forward.thread.name == "a forward"
    await forward.aclose()


async def test_what_the_call_raises_is_raised_to_who_waits() -> None:
    def fail() -> None:
        raise KeyError("layer")

    with pytest.raises(KeyError, match="layer"):
        await Forward(fail, lambda: None, name="a forward").wait()


async def test_closing_stops_the_call_and_waits_for_it() -> None:
    stopped = threading.Event()
    forward = Forward(lambda: stopped.wait(10), stopped.set, name="a forward")
    await forward.aclose()
    assert forward.ended.done()
    assert forward.result() is True


async def test_closing_waits_through_both_kinds_of_cancellation() -> None:
    stopped = threading.Event()
    forward = Forward(lambda: stopped.wait(10), stopped.set, name="a forward")
    with anyio.CancelScope() as scope:
        scope.cancel()
        await forward.aclose()
    assert forward.ended.done()


async def test_closing_does_not_wait_longer_than_a_second() -> None:
    ended = threading.Event()
    forward = Forward(lambda: ended.wait(10), lambda: None, name="a forward")
    async with asyncio.timeout(5):
        await forward.aclose()
    assert not forward.ended.done()
    ended.set()
    assert await forward.wait() is True


async def test_a_cancelled_wait_leaves_the_call_running() -> None:
    ended = threading.Event()
    forward = Forward(lambda: ended.wait(10), ended.set, name="a forward")
    with anyio.move_on_after(0) as scope:
        await forward.wait()
    assert scope.cancelled_caught
    assert not forward.ended.done()
    await forward.aclose()
