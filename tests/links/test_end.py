from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from asynckv.errors import (
    PeerLost,
)
from asynckv.links.dial import dial
from asynckv.links.end import MISSED_BEATS, Heartbeat
from asynckv.protocol.frames import (
    OpenPipe,
)
from asynckv.protocol.values import Limits
from asynckv.testing.blocked import until
from harness.children import line_of
from harness.forks import ForkServer
from harness.link_pairs import ASK, Hearer, linked, name_of

pytestmark = pytest.mark.both_loops


def never(*_: object) -> None:
    """Let the request wait."""


async def test_a_loss_is_told_once_and_never_inside_the_call() -> None:
    async with linked(answer=never) as pair:
        hearer, told = Hearer(), list[PeerLost]()
        pair.near.open_stream(hearer, ASK)
        pair.near.call_when_lost(told.append)
        pair.near.abort()
        assert hearer.losses == told == []
        pair.near.abort()
        await pair.near.aclose()
        assert len(hearer.losses) == len(told) == 1


async def test_where_many_lose_their_link_others_have_their_turn_in_between() -> None:
    async with linked(answer=never) as pair:
        hearers, counts = [Hearer() for _ in range(300)], set[int]()
        for hearer in hearers:
            pair.near.open_stream(hearer, ASK)
        pair.near.abort()
        closing = asyncio.create_task(pair.near.aclose())

        def are_all_told() -> bool:
            counts.add(sum(len(hearer.losses) for hearer in hearers))
            return all(hearer.losses for hearer in hearers)

        await until(are_all_told)
        assert len(counts) > 3 and max(counts) == 300
        await closing


async def test_who_has_closed_a_link_finds_that_all_were_told() -> None:
    async with linked(answer=never) as pair:
        hearers = [Hearer() for _ in range(1000)]
        for hearer in hearers:
            pair.near.open_stream(hearer, ASK)
        await pair.near.aclose()
        assert all(hearer.losses for hearer in hearers)


async def test_who_asks_late_learns_of_the_loss_too() -> None:
    async with linked() as pair:
        pair.near.abort()
        told = list[PeerLost]()
        pair.near.call_when_lost(told.append)
        await until(lambda: bool(told))
        with pytest.raises(PeerLost, match="aborted on this side"):
            pair.near.open_stream(Hearer(), ASK)


async def test_who_is_told_of_a_loss_learns_what_caused_it() -> None:
    async with linked() as pair:
        pair.near.abort(ChildProcessError("lane 1"))
        with pytest.raises(PeerLost) as caught:
            pair.near.open_stream(Hearer(), ASK)
        assert isinstance(caught.value.__cause__, ChildProcessError)


async def test_a_stream_closed_after_the_loss_is_not_told_either() -> None:
    async with linked(answer=never) as pair:
        hearer = Hearer()
        stream = pair.near.open_stream(hearer, ASK)
        pair.near.abort()
        stream.close()
        await pair.near.wait_closed()
        await asyncio.sleep(0)
        assert hearer.losses == []


async def test_each_who_hears_of_a_loss_gets_an_error_of_its_own() -> None:
    async with linked(answer=never) as pair:
        one, two = Hearer(), Hearer()
        pair.near.open_stream(one, ASK)
        pair.near.open_stream(two, ASK)
        pair.near.abort()
        assert await one.loss() is not await two.loss()


async def test_one_listener_that_fails_keeps_no_other_from_hearing() -> None:
    def fail(error: PeerLost) -> None:
        raise RuntimeError("on purpose")

    async with linked() as pair:
        told = list[PeerLost]()
        pair.near.call_when_lost(fail)
        pair.near.call_when_lost(told.append)
        pair.near.abort()
        await until(lambda: bool(told))


async def test_what_a_peer_says_in_parting_is_told_in_one_line() -> None:
    async with linked() as pair:
        pair.near._ending.on_goodbye("done\nCRITICAL root: \x1b[31m")
        assert str(pair.near.error).isprintable()


_LISTENING = """
import asyncio
from asynckv.links.listen import listen
from harness.link_pairs import ScriptedService, name_of

async def main() -> None:
    service = ScriptedService(lambda *_: None)
    listener = await listen(
        "tcp://:0", identity=name_of("frozen"), service_for=lambda link: service
    )
    print(listener.url, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Watched:
    """A heartbeat whose beats and death are noted."""

    def __init__(self, interval_s: float = 0.01) -> None:
        self.beats = 0
        self.is_dead = False
        self.answers = 0
        self.heartbeat = Heartbeat(
            asyncio.get_running_loop(), interval_s, beat=self._beat, dead=self._die
        )
        self.heartbeat.start()

    def _beat(self) -> None:
        self.beats += 1
        if self.answers:
            self.answers -= 1
            self.heartbeat.has_received = True

    def _die(self) -> None:
        self.is_dead = True


async def test_a_silent_peer_is_dead_after_three_intervals() -> None:
    watched = Watched()
    await until(lambda: watched.is_dead)
    assert watched.beats >= MISSED_BEATS


async def test_a_peer_that_is_heard_lives_until_it_is_silent() -> None:
    watched = Watched()
    watched.answers = 10
    await until(lambda: watched.is_dead)
    assert watched.beats >= 10 + MISSED_BEATS


async def test_a_stopped_heartbeat_calls_nobody() -> None:
    stopped, other = Watched(), Watched()
    stopped.heartbeat.stop()
    stopped.heartbeat.stop()
    await until(lambda: other.is_dead)
    assert (stopped.beats, stopped.is_dead) == (0, False)


async def test_a_loop_that_stalls_judges_nobody() -> None:
    watched = Watched(0.05)
    for _ in range(2 * MISSED_BEATS):
        beats = watched.beats
        threading.Event().wait(0.1)
        await until(lambda before=beats: watched.beats > before)  # type: ignore[misc]
    assert not watched.is_dead
    watched.heartbeat.stop()


@pytest.mark.multiprocess
@pytest.mark.parametrize("stop", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_process_that_is_frozen_or_killed_is_lost(
    forks: ForkServer, stop: signal.Signals
) -> None:
    async with forks.running(_LISTENING) as process:
        url, limits = await line_of(process), Limits(heartbeat_ms=100)
        link = await dial(url, identity=name_of("a"), limits=limits)
        hearer = Hearer()
        link.open_stream(hearer, OpenPipe())
        os.kill(process.pid, stop)
        loss = await hearer.loss()
        process.kill()
        await link.aclose()
    assert not loss.goodbye
    assert ("was silent" in str(loss)) == (stop is signal.SIGSTOP)
