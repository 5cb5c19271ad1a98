from __future__ import annotations

import os
import signal

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from harness.crashes.orders import Order, Report
from harness.crashes.workshop import open_workshop


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_worker_is_heard_and_killed(local: LookupBuffer) -> None:
    told: list[Report] = []
    async with (
        serve("tcp://127.0.0.1:0", lookup=local) as server,
        open_workshop(told.append) as workshop,
    ):
        pid = await workshop.start(Order("producer", "p", server.url, seed=1))
        await workshop.steps(pid, 2)
        await workshop.signal(pid, signal.SIGKILL)
        await workshop.signal(pid, signal.SIGKILL)  # gone already: nothing
    words = [report.word for report in told if report.pid == pid]
    assert words[:3] == ["pid", "begun", "in"]
    assert told[-1] == Report(pid, "gone", number=signal.SIGKILL)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_one_that_has_just_ended_can_be_killed(local: LookupBuffer) -> None:
    told: list[Report] = []
    async with (
        serve("tcp://127.0.0.1:0", lookup=local) as server,
        open_workshop(told.append) as workshop,
    ):
        pid = await workshop.start(Order("producer", "p", server.url, seed=1))
        os.kill(pid, signal.SIGKILL)
        while is_alive(pid):
            pass  # and nothing is heard meanwhile
        await workshop.signal(pid, signal.SIGKILL)
    assert told[-1] == Report(pid, "gone", number=signal.SIGKILL)


async def test_leaving_kills_who_still_works(local: LookupBuffer) -> None:
    told: list[Report] = []
    async with serve("tcp://127.0.0.1:0", lookup=local) as server:
        async with open_workshop(told.append) as workshop:
            pid = await workshop.start(Order("consumer", "c", server.url, seed=1))
            await workshop.steps(pid, 1)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
