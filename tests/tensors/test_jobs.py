from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator

import pytest
import torch

from asynckv.devices.copying import CopyPool
from asynckv.tensors.feeds import Feed
from asynckv.tensors.jobs import CopyJob, Pace, run_jobs


class _Fill(CopyJob):
    def __init__(self, target: torch.Tensor, error: Exception | None = None) -> None:
        self._target = target
        self._error = error

    @property
    def nbytes(self) -> int:
        return self._target.nbytes

    def steps(self) -> Generator[None, None, None]:
        for part in self._target:
            if self._error is not None:
                raise self._error
            part.fill_(1)
            yield


def test_jobs_are_done_one_after_the_other() -> None:
    targets = [torch.zeros(4, requires_grad=True) for _ in range(3)]
    run_jobs(_Fill(target) for target in targets)
    assert all(target.all() for target in targets)


def test_a_thread_stands_back_after_a_while_and_not_before() -> None:
    times, pauses = (
        iter([0.0, 0.0002, 0.0003, 0.0005, 0.0006, 0.0008, 1]),
        list[float](),
    )
    pace = Pace(clock=lambda: next(times), sleep=pauses.append)
    counts = []
    for _ in range(4):
        pace.keep()
        counts.append(len(pauses))
    assert counts == [0, 1, 1, 2]


@pytest.mark.parametrize("size", [8, 200_000])
async def test_a_pool_does_all_jobs_small_and_large(pool: CopyPool, size: int) -> None:
    targets = [torch.zeros(2, size) for _ in range(3)]
    await pool.run([_Fill(target) for target in targets])
    assert all(target.all() for target in targets)


@pytest.mark.parametrize("size", [8, 200_000])
async def test_what_a_job_raises_is_raised(pool: CopyPool, size: int) -> None:
    jobs = [_Fill(torch.zeros(2, size)), _Fill(torch.zeros(2, size), ValueError("no"))]
    with pytest.raises(ValueError, match="no"):
        await pool.run(jobs)


async def test_no_jobs_are_no_work(pool: CopyPool) -> None:
    await pool.run([])


@pytest.mark.parametrize("size", [8, 200_000])
async def test_a_pool_makes_jobs_and_does_them_in_its_threads(
    pool: CopyPool, size: int
) -> None:
    targets = [torch.zeros(2, size) for _ in range(30)]
    threads = list[str]()

    def make() -> list[CopyJob]:
        threads.append(threading.current_thread().name)
        return [_Fill(target) for target in targets]

    await pool.make_and_run(make)
    assert [name.startswith("asynckv-copy") for name in threads] == [True]
    assert all(target.all() for target in targets)
    await pool.make_and_run(list)


async def test_both_threads_do_what_one_has_made(pool: CopyPool) -> None:
    both = threading.Barrier(2, timeout=10)

    class _Meeting(_Fill):
        nbytes = 2**21

        def steps(self) -> Generator[None, None, None]:
            both.wait()
            yield

    await pool.make_and_run(lambda: [_Meeting(torch.zeros(1)) for _ in range(2)])
    assert not both.broken


async def test_what_cannot_be_made_is_raised_and_nothing_is_done(
    pool: CopyPool,
) -> None:
    def refuse() -> list[CopyJob]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await pool.make_and_run(refuse)


async def test_a_cancelled_call_waits_for_the_making_and_begins_nothing(
    pool: CopyPool,
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    target = torch.zeros(2, 8)

    def make() -> list[CopyJob]:
        entered.set()
        go_on.wait(10)
        return [_Fill(target)]

    task = asyncio.create_task(pool.make_and_run(make))
    while not entered.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await pool.run([_Fill(torch.zeros(2, 200_000))])
    assert not target.any()


def fed(*pieces: bytes) -> Feed:
    feed = Feed(10)
    for piece in pieces:
        feed.put(memoryview(piece))
    return feed


def test_what_has_come_is_read_across_pieces() -> None:
    feed = fed(b"abc", b"def", b"gh")
    assert feed.fed_bytes == 8
    assert b"".join(feed.pieces(1, 7)) == b"bcdefg"
    assert b"".join(feed.pieces(3, 6)) == b"def"


def test_each_piece_is_told() -> None:
    feed, told = fed(b"abc"), list[int]()
    feed.call_when_fed(lambda: told.append(feed.fed_bytes))
    feed.put(memoryview(b"de"))
    feed.put(memoryview(b"f"))
    assert told == [5, 6]


def test_what_was_left_is_not_kept() -> None:
    first, second = bytearray(b"abc"), bytearray(b"def")
    feed = Feed(6)
    feed.put(memoryview(first))
    feed.put(memoryview(second))
    feed.discard(5)
    first.clear()
    assert bytes(feed.pieces(5, 6)[0]) == b"f"
    with pytest.raises(BufferError):
        second.clear()
    feed.discard(6)
    second.clear()


def test_a_feed_that_is_closed_keeps_nothing() -> None:
    first, second = bytearray(b"abc"), bytearray(b"def")
    feed, told = Feed(6), list[None]()
    feed.call_when_fed(lambda: told.append(None))
    feed.put(memoryview(first))
    feed.close()
    feed.put(memoryview(second))
    first.clear()
    second.clear()
    assert feed.fed_bytes == 6 and len(told) == 1


def test_more_than_was_to_come_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 10"):
        fed(b"abcdefgh").put(memoryview(b"ijk"))
