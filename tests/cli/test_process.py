from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import signal
import subprocess
from collections.abc import Iterator

import pytest

from asynckv.cli.process import (
    INTERRUPTED,
    LoopName,
    describe_host,
    processor,
    run,
    stop_signal,
    until_ended,
)
from asynckv.errors import ConfigError
from harness.forks import ForkServer

pytest.importorskip("uvloop").new_event_loop().close()  # its first makes a lasting pipe


async def name_of_the_loop() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


@pytest.mark.parametrize(
    ("chosen", "found"),
    [("auto", "uvloop"), ("uvloop", "uvloop"), ("asyncio", "asyncio")],
)
def test_work_runs_on_the_loop_that_was_chosen(chosen: LoopName, found: str) -> None:
    assert run(name_of_the_loop(), chosen) == found


def test_without_uvloop_work_runs_on_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert run(name_of_the_loop()) == "asyncio"
    with pytest.raises(ConfigError, match="not installed"):
        run(name_of_the_loop(), "uvloop")


async def test_what_is_done_is_returned() -> None:
    async def work() -> int:
        return INTERRUPTED

    assert await until_ended(work()) == 130


async def test_a_polite_end_is_a_cancellation() -> None:
    async def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(until_ended(work()))


@pytest.mark.both_loops
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_the_first_signal_is_told_and_the_next_one_is_the_kernel_s(
    number: signal.Signals, all_signals: None
) -> None:
    with stop_signal() as stopped:
        os.kill(os.getpid(), number)
        assert await stopped == number.name
        for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            assert signal.getsignal(one) == signal.SIG_DFL


@pytest.mark.both_loops
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_that_is_ignored_stays_so(
    number: signal.Signals, all_signals: None
) -> None:
    signal.signal(number, signal.SIG_IGN)

    async def is_ignored() -> bool:
        return signal.getsignal(number) == signal.SIG_IGN

    assert await until_ended(is_ignored()) and await is_ignored()
    with stop_signal():
        assert await is_ignored()
    assert await is_ignored()


STUCK = """
import os, signal, sys
from asynckv.cli.process import run, stop_signal

async def main():
    with stop_signal():
        for number in sys.argv[2:]:
            os.kill(os.getpid(), int(number))
        print("alone")

run(main(), sys.argv[1])
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_though_the_loop_is_stuck(
    forks: ForkServer, loop: LoopName, second: signal.Signals
) -> None:
    signals = (f"{signal.SIGTERM:d}", f"{second:d}")
    async with forks.running(STUCK, loop, *signals, stderr=subprocess.STDOUT) as fork:
        shown = await fork.stdout.read()
        assert await fork.wait() == -second, shown


BUSY = """
import asyncio, os, signal, sys
from asynckv.cli.process import run, stop_signal

async def main():
    with stop_signal() as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(int(sys.argv[2])):
            await asyncio.sleep(0)
        os.kill(os.getpid(), int(sys.argv[3]))
        print(await stopped, "alone")
        await asyncio.sleep(0)

run(main(), sys.argv[1])
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("rounds", range(5))
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGHUP])
async def test_a_second_signal_ends_it_however_soon_it_comes(
    forks: ForkServer, loop: LoopName, rounds: int, second: signal.Signals
) -> None:
    args = (loop, f"{rounds}", f"{second:d}")
    async with forks.running(BUSY, *args, stderr=subprocess.STDOUT) as fork:
        shown = await fork.stdout.read()
        assert await fork.wait() == -second, shown


async def test_without_a_signal_all_is_as_it_was(all_signals: None) -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_signal() as stopped:
        assert signal.getsignal(signal.SIGINT) != before
    assert stopped.cancelled() and signal.getsignal(signal.SIGINT) == before


@pytest.fixture
def all_signals() -> Iterator[None]:
    """Let them do what they do by default, and put back what they did."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield
    for number, what in before.items():
        signal.signal(number, what)


def test_a_host_is_described_without_its_name() -> None:
    words = describe_host()
    assert words.startswith(processor())
    assert "cores, load" in words
    assert platform.node() not in words
