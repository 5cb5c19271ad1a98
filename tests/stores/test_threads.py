"""Threads do what they are told to, reads first, and nobody waits for them for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from asynckv.stores.threads import READ, SCAN, WRITE, Stopped, TierThreads
from asynckv.testing.blocked import until

pytestmark = pytest.mark.both_loops


class Bench:
    """Two threads, jobs that wait for a gate, and what came of them, in order."""

    def __init__(self, count: int = 2, own: Callable[[], object] = object) -> None:
        self.ended: list[str] = []
        self.began: list[str] = []
        self.results: list[str] = []
        self.gate = threading.Event()
        self.threads = TierThreads(
            count,
            asyncio.get_running_loop(),
            lambda: self.ended.append("once"),
            own,
            name="thread of a test",
        )

    def submit(self, when: int, name: str, *, waits: bool = False) -> None:
        def work(own: object) -> str:
            self.began.append(name)
            if waits:
                self.gate.wait()
            return name

        self.threads.submit(when, work, self.note(name))

    def note(self, name: str) -> Callable[[object, Exception | None], None]:
        def done(result: object, error: Exception | None) -> None:
            self.results.append(name if error is None else f"{name}: {error!r}")

        return done


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.gate.set()
    bench.threads.stop()
    await bench.threads.is_over.wait()
    assert bench.ended == ["once"]


async def test_reads_go_before_writes_and_both_before_a_scan(bench: Bench) -> None:
    for name in ("one", "other"):
        bench.submit(WRITE, name, waits=True)
    await until(lambda: len(bench.began) == 2)
    for when, name in ((SCAN, "scan"), (WRITE, "write"), (READ, "read")):
        bench.submit(when, name)
    bench.gate.set()
    await until(lambda: len(bench.results) == 5)
    assert bench.began[2:] == ["read", "write", "scan"]


async def test_as_many_run_at_once_as_there_are_threads(bench: Bench) -> None:
    bench.submit(READ, "first")
    await until(lambda: bench.results == ["first"])
    for name in "abc":
        bench.submit(READ, name, waits=True)
    await until(lambda: len(bench.began) == 3)
    bench.gate.set()
    await until(lambda: len(bench.results) == 4)


async def test_who_fails_is_told_of(bench: Bench) -> None:
    def work(own: object) -> None:
        raise OSError("broken")

    bench.threads.submit(READ, work, bench.note("a"))
    await until(lambda: bool(bench.results))
    assert bench.results == ["a: OSError('broken')"]


@pytest.mark.parametrize("what", ["thread", "memory"])
async def test_where_no_thread_can_begin_that_is_told_and_the_next_one_may(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: object = None) -> None:
        raise RuntimeError("no more")

    refused = [refuse] if what == "memory" else []
    bench = Bench(1, own=lambda: refused.pop()() if refused else None)
    with monkeypatch.context() as patch:
        if what == "thread":
            patch.setattr(threading.Thread, "start", refuse)
        bench.submit(READ, "a")
    await until(lambda: len(bench.results) == 1)
    bench.submit(READ, "b")
    await until(lambda: len(bench.results) == 2)
    assert bench.results == ["a: RuntimeError('no more')", "b"]
    bench.threads.stop()
    await bench.threads.is_over.wait()


async def test_what_was_not_begun_is_stopped(bench: Bench) -> None:
    for name in ("one", "other"):
        bench.submit(READ, name, waits=True)
    await until(lambda: len(bench.began) == 2)
    bench.submit(READ, "late")
    bench.threads.stop()
    bench.threads.stop()
    bench.submit(READ, "later")
    await until(lambda: len(bench.results) == 2)
    assert bench.results == ["late: Stopped()", "later: Stopped()"]
    assert not bench.ended
    with pytest.raises(Stopped):
        bench.threads.check()
    bench.gate.set()
    await until(lambda: len(bench.results) == 4)


async def test_where_nothing_was_done_nothing_is_waited_for(bench: Bench) -> None:
    bench.threads.stop()
    await bench.threads.is_over.wait()


async def test_the_loop_has_its_turn_between_many_results(bench: Bench) -> None:
    for name in ("one", "other"):
        bench.submit(READ, name, waits=True)
    await until(lambda: len(bench.began) == 2)
    for number in range(40):
        bench.submit(READ, str(number))
    bench.threads.stop()  # forty results at once
    turns = 0
    while len(bench.results) < 40:
        before = len(bench.results)
        await asyncio.sleep(0)
        turns += len(bench.results) > before
    assert turns >= 5
