from __future__ import annotations

import asyncio

import pytest
import torch

from asynckv.testing.blocked import until
from harness.cancellations import quiet
from harness.cancellations.grounds import Ground, open_ground


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "_TIMEOUT_S", 0.05)


async def left_in(ground: Ground) -> str:
    with pytest.raises(AssertionError, match="left behind: ") as caught:
        await ground.check_quiet()
    return str(caught.value)


async def test_nothing_is_left_in_the_beginning() -> None:
    async with open_ground("mem") as ground:
        await ground.check_quiet()


async def test_an_entry_and_its_bytes_are_told() -> None:
    async with open_ground("mem") as ground:
        await ground.local.insert([1], None, torch.zeros(100), None, None)
        assert "entries: 1, arena bytes: " in await left_in(ground)
        await ground.local.drop_select([1])
        await ground.check_quiet()


async def test_a_lease_and_its_stream_are_told_on_each_side() -> None:
    async with open_ground("mem") as ground:
        await ground.local.insert([1], None, torch.zeros(100), None, None)
        async with ground.consumer.drop_select([1]):
            told = await left_in(ground)
        assert "leases: 1" in told and "deliveries served: 1" in told
        assert told.count("streams: 1") == 2


async def test_a_call_that_waits_is_told() -> None:
    async with open_ground("mem") as ground:
        waiting = asyncio.ensure_future(ground.consumer.drop_select([1]))
        await until(lambda: ground.local.statistics().waiting_selects == 1)
        assert "selecting: 1" in await left_in(ground)
        waiting.cancel()
        await asyncio.wait({waiting})
        await ground.check_quiet()


async def test_a_task_is_told() -> None:
    async with open_ground("local") as ground:
        task = asyncio.create_task(asyncio.Event().wait(), name="idle")
        assert await left_in(ground) == "left behind: task idle: 1"
        task.cancel()
        await asyncio.wait({task})


async def test_a_tensor_that_nobody_took_from_the_pipe_is_told() -> None:
    async with open_ground("mem") as ground:
        assert ground.pipe is not None
        near, far = ground.pipe
        await near.send_tensor(torch.zeros(10))
        assert "bytes held: " in await left_in(ground)
        await far.recv_tensor()
        await ground.check_quiet()
