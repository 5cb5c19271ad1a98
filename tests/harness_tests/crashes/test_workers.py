from __future__ import annotations

import asyncio

import msgspec
import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from asynckv.testing.blocked import until
from harness.crashes.orders import Order, Report
from harness.crashes.workers import Worker


async def test_each_step_is_told_before_the_next(
    local: LookupBuffer, capfd: pytest.CaptureFixture[str]
) -> None:
    async with serve("mem://", lookup=local) as server:
        working = [
            asyncio.create_task(Worker(Order(role, role, server.url, 3), {}).work())
            for role in ("producer", "consumer")
        ]
        await until(lambda: local.statistics().acknowledged > 12)
        for task in working:
            task.cancel()
        await asyncio.wait(working)
    lines = capfd.readouterr().out.splitlines()
    words = {msgspec.json.decode(line, type=Report).word for line in lines}
    assert words == {"begun", "in", "wait", "got", "leaving", "done"}
