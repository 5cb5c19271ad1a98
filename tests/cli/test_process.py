from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import signal

import pytest

from asynckv.cli.process import (
    INTERRUPTED,
    LoopName,
    describe_host,
    processor,
    run,
    until_ended,
)
from asynckv.errors import ConfigError

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


def test_a_host_is_described_without_its_name() -> None:
    words = describe_host()
    assert words.startswith(processor())
    assert "cores, load" in words
    assert platform.node() not in words
