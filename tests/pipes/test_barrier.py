from __future__ import annotations

import asyncio
import logging

import pytest

from asynckv.errors import PeerLost, RemoteProtocolError
from asynckv.pipes.rendezvous import Barrier
from asynckv.testing import until_blocked


class Told(Barrier):
    """A barrier that keeps what it says."""

    def __init__(self) -> None:
        self.said: list[int] = []
        super().__init__(self.said.append)


async def test_a_rank_says_that_it_came_and_passes_when_it_is_told() -> None:
    barrier = Told()
    for number in (1, 2):
        waiting = asyncio.create_task(barrier.wait())
        await until_blocked(waiting)
        assert barrier.said[-1] == number
        barrier.release(number)
        await waiting
    assert barrier.said == [1, 2]


async def test_a_barrier_may_open_while_the_last_rank_comes() -> None:
    barrier = Barrier(lambda number: barrier.release(number))
    await barrier.wait()
    await barrier.wait()
    assert barrier.released == 2


@pytest.mark.parametrize("released_meanwhile", [False, True])
async def test_after_a_cancellation_the_next_call_waits_at_the_same_barrier(
    released_meanwhile: bool,
) -> None:
    barrier = Told()
    cancelled = asyncio.create_task(barrier.wait())
    await until_blocked(cancelled)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    if released_meanwhile:
        barrier.release(1)
    again = asyncio.create_task(barrier.wait())
    await until_blocked(again)
    if not released_meanwhile:
        barrier.release(1)
    await again
    assert barrier.said == [1]


async def test_calls_at_the_same_time_wait_at_the_same_barrier() -> None:
    barrier = Told()
    tasks = [asyncio.create_task(barrier.wait()) for _ in range(2)]
    await until_blocked(*tasks)
    barrier.release(1)
    await asyncio.gather(*tasks)
    assert barrier.said == [1]


async def test_a_lost_rank_ends_every_wait() -> None:
    barrier = Told()
    waiting = asyncio.create_task(barrier.wait())
    await until_blocked(waiting)
    barrier.end(PeerLost("rank 2 is lost"))
    for call in (waiting, barrier.wait()):
        with pytest.raises(PeerLost, match="rank 2"):
            await call


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_release_that_makes_no_sense_is_a_lie(number: int) -> None:
    with pytest.raises(RemoteProtocolError):
        Told().release(number)


async def test_the_wait_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    barrier = Told()
    with caplog.at_level(logging.DEBUG):
        waiting = asyncio.create_task(barrier.wait())
        await until_blocked(waiting)
    barrier.release(1)
    await waiting
    assert "barrier 1 waits for every rank to come" in caplog.text
