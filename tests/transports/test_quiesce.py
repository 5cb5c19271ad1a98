from __future__ import annotations

import asyncio
import threading

from asynckv.errors import PeerLost
from asynckv.testing import until, until_blocked
from asynckv.transports.parts import Part
from asynckv.transports.quiesce import Ending, QuiesceWaits

_LOST = PeerLost("the cable was cut")


class Ends:
    """An ending, and everything that it says in order."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.is_touching = True
        self.ending = Ending(
            asyncio.get_running_loop(),
            lambda error: self.said.append(("lost", error)),
            hang_up=lambda: self.said.append("hang up"),
            is_touching=lambda: self.is_touching,
            take_left=self._take_left,
        )
        self._left = [Part(1, 0, memoryview(b"x"), self._done, b"")]

    def _done(self, digest: bytes, error: BaseException | None) -> None:
        self.said.append((digest, error))

    def _take_left(self) -> list[Part]:
        left, self._left = self._left, []
        return left


async def test_parts_are_told_when_no_thread_touches_memory() -> None:
    ends = Ends()
    ends.ending.lose(_LOST)
    await asyncio.sleep(0)
    assert ends.said == ["hang up", ("lost", _LOST)]
    ends.is_touching = False
    ends.ending.settle()
    ends.ending.settle()
    assert ends.said[2:] == [(b"", _LOST)]


async def test_only_the_first_end_counts() -> None:
    ends = Ends()
    ends.ending.end(PeerLost("closed"))
    ends.ending.lose(_LOST)
    ends.ending.end(_LOST)
    assert ends.said == ["hang up"]
    assert str(ends.ending.error) == "closed"


async def test_nothing_is_settled_before_the_end() -> None:
    ends = Ends()
    ends.is_touching = False
    ends.ending.settle()
    assert ends.said == []


async def test_waiting_for_the_end_is_bounded() -> None:
    ends = Ends()
    await ends.ending.wait(0.01)
    ends.ending.end(_LOST)
    ends.is_touching = False
    thread = threading.Thread(target=ends.ending.settle_soon)
    thread.start()
    async with asyncio.timeout(5):
        await ends.ending.wait(60)
    assert ends.said[-1] == (b"", _LOST)
    thread.join()


def test_a_closed_loop_is_no_error() -> None:
    async def make() -> Ends:
        return Ends()

    asyncio.run(make()).ending.end(_LOST)


def _never() -> None:
    raise AssertionError("nobody was to give up")


async def test_what_nobody_touches_is_quiet_at_once() -> None:
    quiet = QuiesceWaits(asyncio.get_running_loop(), lambda transfer: False)
    await quiet.wait(1, _never)


async def test_each_wait_ends_with_its_own_transfer() -> None:
    touched = {1, 2}
    quiet = QuiesceWaits(asyncio.get_running_loop(), touched.__contains__)
    waits = [asyncio.create_task(quiet.wait(n, _never)) for n in (1, 2, 1)]
    await until_blocked(*waits)
    touched.discard(1)
    quiet.settle()
    await until(lambda: waits[0].done() and waits[2].done())
    assert not waits[1].done()
    touched.clear()
    quiet.settle()
    await waits[1]


async def test_a_cancellation_is_delivered_when_it_is_quiet() -> None:
    touched = {1}
    quiet = QuiesceWaits(asyncio.get_running_loop(), touched.__contains__)
    wait = asyncio.create_task(quiet.wait(1, _never))
    await until_blocked(wait)
    wait.cancel()
    await until_blocked(wait)
    assert not wait.done()
    touched.clear()
    quiet.settle()
    await asyncio.wait({wait})
    assert wait.cancelled()
