"""Calls of many tasks on one pipe: each has its turn, and none keeps the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from asynckv.errors import WrongLoop
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.pipes.pipe import Pipe
from asynckv.pipes.shared_memory import MapSharing
from asynckv.testing.blocked import until_blocked
from asynckv.testing.expectations import is_same, noise
from asynckv.testing.pairs import Scheme, open_pipe_pair
from asynckv.testing.pipe_checks import LARGE

MANY = 200
SCHEMES = pytest.mark.parametrize("scheme", ["mem", "tcp"])


@SCHEMES
async def test_senders_are_served_in_the_order_of_their_calls(scheme: Scheme) -> None:
    async with open_pipe_pair(scheme) as (near, far):
        async with asyncio.TaskGroup() as group:
            for number in range(MANY):
                group.create_task(near.send_tensor(torch.tensor([number])))
            received = [await far.recv_tensor() for _ in range(MANY)]
    assert [int(one) for one in received if one is not None] == [*range(MANY)]


@SCHEMES
async def test_receivers_are_served_in_the_order_of_their_calls(scheme: Scheme) -> None:
    async with open_pipe_pair(scheme) as (near, far):
        calls = [asyncio.create_task(far.recv_tensor()) for _ in range(MANY)]
        for number in range(MANY):
            await near.send_tensor(torch.tensor([number]))
        received = await asyncio.gather(*calls)
    assert [int(one) for one in received if one is not None] == [*range(MANY)]


@pytest.mark.parametrize(
    "use",
    [
        lambda pipe: pipe.send_tensor(None),
        lambda pipe: pipe.recv_tensor(),
        lambda pipe: pipe.flush(),
        lambda pipe: pipe.aclose(),
    ],
)
async def test_a_pipe_is_used_on_its_own_loop_alone(
    use: Callable[[Pipe], Coroutine[Any, Any, object]],
) -> None:
    async with open_pipe_pair("mem") as (near, far):
        with pytest.raises(WrongLoop):
            await asyncio.to_thread(asyncio.run, use(near))
        await near.send_tensor(None)
        assert await far.recv_tensor() is None


async def test_a_call_that_is_cancelled_as_it_yields_leaves_no_trace() -> None:
    async with open_pipe_pair("mem") as (near, far):
        for number in range(MANY):
            sending = asyncio.create_task(near.send_tensor(torch.tensor([number])))
            await asyncio.sleep(0)
            sending.cancel()
            await asyncio.wait({sending})
            if sending.cancelled():
                await near.send_tensor(torch.tensor([number]))
            receiving = asyncio.create_task(far.recv_tensor())
            await asyncio.sleep(0)
            receiving.cancel()
            await asyncio.wait({receiving})
            received = await (far.recv_tensor() if receiving.cancelled() else receiving)
            assert received is not None and int(received) == number


@pytest.mark.skipif(not has_fd_sockets(), reason="nothing to map here")
async def test_a_receive_that_is_cancelled_while_it_copies_keeps_no_flush_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor, begun, read = noise(LARGE, 1), asyncio.Event(), MapSharing.read

    async def held(sharing: MapSharing, *args: Any) -> None:
        if not begun.is_set():
            begun.set()
            await asyncio.get_running_loop().create_future()
        await read(sharing, *args)

    monkeypatch.setattr(MapSharing, "read", held)
    async with open_pipe_pair("map") as (near, far), asyncio.timeout(10):
        receiving = asyncio.create_task(far.recv_tensor(torch.empty_like(tensor)))
        await until_blocked(receiving)
        await near.send_tensor(tensor)
        await begun.wait()
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        await near.flush()
        assert is_same(await far.recv_tensor(), tensor)
