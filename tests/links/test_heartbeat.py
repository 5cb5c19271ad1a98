from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

from asynckv.links.dial import dial
from asynckv.links.ending import MISSED_BEATS, Heartbeat
from asynckv.protocol.frames import OpenPipe
from asynckv.protocol.values import Limits
from asynckv.testing.blocked import until
from harness.link_pairs import Hearer, name_of

pytestmark = pytest.mark.both_loops

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
            self.heartbeat.was_heard = True

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
async def test_a_process_that_is_frozen_or_killed_is_lost(stop: signal.Signals) -> None:
    with subprocess.Popen(  # noqa: ASYNC220 - the loop does nothing else
        [sys.executable, "-c", _LISTENING], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        link = await dial(url, identity=name_of("a"), limits=Limits(heartbeat_ms=100))
        hearer = Hearer()
        link.open_stream(hearer, OpenPipe())
        process.send_signal(stop)
        loss = await hearer.loss()
        process.kill()
        await link.aclose()
    assert not loss.goodbye
    assert ("was silent" in str(loss)) == (stop is signal.SIGSTOP)
