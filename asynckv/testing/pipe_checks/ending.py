"""How a pipe ends: by a goodbye, or by a loss."""

from __future__ import annotations

import asyncio
from typing import Final

import torch

from asynckv.abc import KVPipe
from asynckv.errors import EndOfStream, PeerLost, PipeBroken
from asynckv.testing.blocked import until_blocked
from asynckv.testing.expectations import expect, expect_error, expect_same, noise
from asynckv.testing.pipe_checks.values import LARGE, PipeCheck, send_many

__all__ = (
    "ENDING_CHECKS",
    "a_closed_pipe_says_so",
    "a_lost_peer_is_an_error",
    "the_goodbye_comes_after_everything",
)


async def the_goodbye_comes_after_everything(near: KVPipe, far: KVPipe) -> None:
    """What was sent before can still be received; then the iteration ends."""
    await send_many(near, 3)
    await near.send_tensor(None)
    await near.aclose()
    received = [tensor async for tensor in far]
    for seed in range(3):
        expect_same(received[seed], noise(LARGE, seed))
    expect(received[3:] == [None], "None came last")
    await expect_error(EndOfStream, far.recv_tensor())
    await expect_error(EndOfStream, far.send_tensor(None))
    await far.flush()


async def a_closed_pipe_says_so(near: KVPipe, far: KVPipe) -> None:
    """Also to those who wait, and it may be closed again."""
    receiving = asyncio.create_task(near.recv_tensor())
    await until_blocked(receiving)
    await near.aclose()
    await expect_error(EndOfStream, receiving)
    for _ in range(2):
        await expect_error(EndOfStream, near.recv_tensor())
        await expect_error(EndOfStream, near.send_tensor(None))
        await near.aclose()


async def a_lost_peer_is_an_error(near: KVPipe, far: KVPipe) -> None:
    """What had come can be received; then it is ``PeerLost``, and never the end."""
    await far.send_tensor(torch.ones(1))
    await far.flush()
    for seed in range(8):
        await near.send_tensor(noise(LARGE, seed))
    sending = asyncio.create_task(near.send_tensor(noise(LARGE, 9)))
    await until_blocked(sending)
    far.abort()
    error = await expect_error(PipeBroken, sending)
    expect(error.maybe_delivered >= 4, f"maybe_delivered: {error.maybe_delivered}")
    expect_same(await near.recv_tensor(), torch.ones(1))
    lost = await expect_error(PeerLost, near.recv_tensor())
    expect(not isinstance(lost, PipeBroken), "receiving raises plain PeerLost")
    await expect_error(PeerLost, anext(near))
    await expect_error(PipeBroken, near.flush())


ENDING_CHECKS: Final[tuple[PipeCheck, ...]] = (
    the_goodbye_comes_after_everything,
    a_closed_pipe_says_so,
    a_lost_peer_is_an_error,
)
