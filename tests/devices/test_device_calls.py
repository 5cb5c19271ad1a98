from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from asynckv.devices.opening import DeviceCalls
from asynckv.errors import GPUFailed, GPUUnavailable
from asynckv.testing import until, until_blocked

pytestmark = pytest.mark.both_loops


class Answer:
    """What CUDA returns when it is allowed to."""


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    released = threading.Event()
    yield released
    released.set()


async def test_a_call_is_made_in_another_thread() -> None:
    found = await DeviceCalls().call(threading.current_thread)
    assert found is not threading.current_thread()


async def test_what_a_call_raises_is_raised() -> None:
    def refuse() -> None:
        raise GPUUnavailable("no driver")

    with pytest.raises(GPUUnavailable, match="no driver"):
        await DeviceCalls().call(refuse)


async def test_a_call_that_does_not_return_is_not_waited_for_any_longer(
    stuck: threading.Event,
) -> None:
    calls = DeviceCalls(limit_s=0.05)
    for _ in range(2):  # the second does not even get its turn
        with pytest.raises(GPUFailed, match=r"within 0.05 s.*nvidia-smi"):
            await calls.call(stuck.wait)


async def test_a_cancelled_call_waits_for_nothing(stuck: threading.Event) -> None:
    calling = asyncio.create_task(DeviceCalls().call(stuck.wait))
    await until_blocked(calling)
    calling.cancel()
    await asyncio.wait({calling})
    assert calling.cancelled() and not stuck.is_set()


async def test_the_next_call_waits_for_one_that_was_cancelled(
    stuck: threading.Event,
) -> None:
    calls = DeviceCalls()
    first = asyncio.create_task(calls.call(stuck.wait))
    await until_blocked(first)
    first.cancel()
    second = asyncio.create_task(calls.call(stuck.is_set))
    await until_blocked(second)
    stuck.set()
    assert await second


async def test_what_a_cancelled_call_returns_is_dropped(stuck: threading.Event) -> None:
    made: list[weakref.ref[Answer]] = []

    def work() -> Answer:
        stuck.wait()
        answer = Answer()
        made.append(weakref.ref(answer))
        return answer

    calls = DeviceCalls()
    calling = asyncio.create_task(calls.call(work))
    await until_blocked(calling)
    calling.cancel()
    await asyncio.wait({calling})
    stuck.set()
    await until(lambda: bool(made) and gc.collect() >= 0 and made[0]() is None)
