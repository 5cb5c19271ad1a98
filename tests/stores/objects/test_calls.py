"""A call of obstore that is given up has let go of the memory it was lent."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest
from obstore.store import LocalStore

from asynckv.abc.tiers import TierResult
from asynckv.stores.objects import ObjectTier
from asynckv.stores.objects.calls import ObstoreCalls, Stopped
from asynckv.testing.blocked import until_blocked
from asynckv.testing.tier_checks import SomeValue
from harness.moto_server import MotoServer

DONE, FAILED = TierResult.DONE, TierResult.FAILED
CANCELS = 50
NBYTES = 2**19


@pytest.mark.both_loops
@pytest.mark.slow
async def test_of_what_is_overwritten_when_its_put_was_cancelled_nothing_is_torn(
    url: str,
) -> None:
    source = SomeValue("k1/a", NBYTES, 1)
    stored = source.to_store()
    data, other = source.data, bytes(NBYTES)
    async with ObjectTier.from_url(url) as tier:
        took_s = await time_of(tier.store([stored]))
        for number in range(CANCELS):
            source.fill(data)
            stored.key = f"k1/{number}"
            putting = asyncio.ensure_future(tier.store([stored]))
            await asyncio.sleep(random.random() * took_s)
            putting.cancel()
            await asyncio.wait({putting})
            source.fill(other)
        for number in range(CANCELS):
            wanted = SomeValue(f"k1/{number}", NBYTES)
            (result,) = await tier.fetch([wanted])
            assert result is not DONE or wanted.is_one_of(1)


async def time_of(call: Awaitable[Any]) -> float:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await call
    return loop.time() - began_s


@pytest.mark.slow
async def test_memory_of_a_fetch_that_was_cancelled_is_not_written_to(url: str) -> None:
    async with ObjectTier.from_url(url) as tier:
        assert await tier.store([SomeValue("k1/a", NBYTES, 1).to_store()]) == [DONE]
        took_s = await time_of(tier.fetch([SomeValue("k1/a", NBYTES)]))
        left = []
        for _ in range(CANCELS // 10):
            wanted = SomeValue("k1/a", NBYTES)
            getting = asyncio.ensure_future(tier.fetch([wanted]))
            await asyncio.sleep(random.random() * took_s)
            getting.cancel()
            await asyncio.wait({getting})
            wanted.fill(bytes(NBYTES))
            left.append(wanted)
        assert await tier.fetch([SomeValue("k1/a", NBYTES)]) == [DONE]
        assert not any(any(wanted.data) for wanted in left)


@pytest.fixture
def frozen(s3: MotoServer) -> Iterator[MotoServer]:
    s3.freeze()
    yield s3
    s3.thaw()


async def test_a_put_to_a_frozen_server_lets_go_when_it_is_cancelled_twice(
    frozen: MotoServer, prefix: str
) -> None:
    source = SomeValue("k1/a", 64 * NBYTES, 1)
    async with ObjectTier.from_url(frozen.url(prefix)) as tier:
        putting = asyncio.ensure_future(tier.store([source.to_store()]))
        await asyncio.sleep(0)
        for _ in range(2):
            putting.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(10):
                await putting
        source.fill(bytes(source.nbytes))
        frozen.thaw()
        wanted = SomeValue("k1/a", source.nbytes)
        assert await tier.fetch([wanted]) != [DONE]


@pytest.mark.parametrize("verb", ["store", "fetch", "delete", "contains", "probe"])
async def test_what_waits_for_a_frozen_server_ends_when_the_tier_is_closed(
    verb: str, frozen: MotoServer, prefix: str
) -> None:
    tier = ObjectTier.from_url(frozen.url(prefix))
    value = SomeValue("k1/a", NBYTES, 1)
    calls = {
        "store": lambda: tier.store([value.to_store()] * 20),
        "fetch": lambda: tier.fetch([value] * 20),
        "delete": lambda: tier.delete(["k1/a"] * 20),
        "contains": lambda: tier.contains(["k1/a"]),
        "probe": tier.probe,
    }
    waiting = asyncio.ensure_future(_results(calls[verb]()))
    await until_blocked(waiting)
    async with asyncio.timeout(5):
        await tier.aclose()
        assert await waiting == {FAILED}


async def _results(call: Awaitable[Any]) -> set[TierResult]:
    try:
        return set(await call)
    except OSError:
        return {FAILED}


async def test_a_closed_tier_does_nothing_any_more(url: str) -> None:
    async with ObjectTier.from_url(url) as tier:
        assert await tier.store([SomeValue("k1/a", 10).to_store()]) == [DONE]
    await tier.aclose()
    assert await tier.store([SomeValue("k1/a", 10).to_store()]) == [FAILED]
    assert await tier.fetch([SomeValue("k1/a", 10)]) == [FAILED]
    assert await tier.delete(["k1/a"]) == [FAILED]
    assert await tier.contains(["k1/b"]) == [FAILED]
    with pytest.raises(OSError, match="closed"):
        await tier.probe()


async def test_a_call_that_is_stopped_says_so(tmp_path: Path) -> None:
    calls = ObstoreCalls()
    waiting = asyncio.ensure_future(
        calls.call(asyncio.get_running_loop().create_future)
    )
    await until_blocked(waiting)
    calls.abort()
    with pytest.raises(Stopped):
        await waiting
    with pytest.raises(Stopped):
        await calls.put(LocalStore(tmp_path), "a", [memoryview(b"a")])
    await calls.aclose()


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_interpreter_ends_as_it_should_right_after_a_call(
    s3: MotoServer, prefix: str, tmp_path: Path
) -> None:
    urls = [s3.url(prefix), f"file://{tmp_path}/kv"]
    worker = [sys.executable, "-m", "harness.object_worker", *urls]
    ended = subprocess.run(worker, capture_output=True, text=True, check=False)
    assert (ended.stdout.split(), ended.stderr) == (["0"] * 4, "")
