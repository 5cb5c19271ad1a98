"""Pipes: a cancelled send has sent nothing, a cancelled receive has taken nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import torch

from asynckv.errors import EndOfStream, PeerLost, PipeBroken
from asynckv.pipes.endpoints import listen_pipe
from asynckv.pipes.pipe import Pipe
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect, expect_error, expect_same, noise
from asynckv.testing.pairs import new_url, open_pipe_pair
from harness.cancellations.entries import (
    OVERWRITE,
    Partner,
    expect_overwritten,
    zeros,
)
from harness.cancellations.grounds import PIPE_BYTES, Ground
from harness.cancellations.sweeper import OVER_LINKS, SMALL, Sweeper, scenario

__all__: tuple[str, ...] = ()


class _Tensors:
    """One tensor at a time, in memory that its owner writes to afterwards."""

    def __init__(self, ground: Ground, nbytes: int) -> None:
        self.near, self.far = ground.ends
        self.contents = noise(nbytes, 1)
        self.source, self.into = zeros(nbytes), zeros(nbytes)

    async def send(self) -> None:
        self.source.copy_(self.contents)
        try:
            await self.near.send_tensor(self.source)
        finally:
            self.source.fill_(OVERWRITE)

    async def receive(self) -> None:
        self.into.zero_()
        try:
            expect_same(await self.far.recv_tensor(self.into), self.contents)
        finally:
            self.into.fill_(OVERWRITE)

    async def check_sent(self, ground: Ground, outcome: Outcome[None]) -> None:
        """All of it was, or nothing."""
        await self.near.send_tensor(None)
        if not outcome.cancelled:
            await self.receive()
        expect(await self.far.recv_tensor() is None, "a cancelled send has sent")
        await self.near.flush()
        await ground.check_quiet()


@scenario("KVPipe.send_tensor", kinds=OVER_LINKS)
async def a_send(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Into a pipe that has room."""
    tensors = _Tensors(ground, nbytes)
    async for cancel in sweeper.sweep():
        await tensors.check_sent(ground, await cancel(tensors.send))


@scenario("KVPipe.send_tensor", kinds=OVER_LINKS)
async def a_send_that_waits_for_room(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """Which comes when the peer receives, soon or in that very tick."""
    tensors = _Tensors(ground, nbytes)
    near, far = ground.ends

    async def receive() -> None:
        for _ in range(2):
            await far.recv_tensor()

    async for cancel in sweeper.sweep():
        for _ in range(2):  # one is received ahead, the other is in flight
            await near.send_tensor(zeros(PIPE_BYTES))
        partner = Partner(
            sweeper, lambda: near.statistics().waiting_senders > 0, receive
        )
        outcome = await cancel(tensors.send)
        await partner.ended()
        await tensors.check_sent(ground, outcome)


async def _next_of(pipe: Pipe) -> torch.Tensor | None:
    async for tensor in pipe:
        return tensor
    raise AssertionError("the pipe has ended")


@scenario("KVPipe.recv_tensor", "KVPipe.__anext__", kinds=OVER_LINKS)
async def a_receive(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Into memory of the caller, of what is there and of what comes; or by iterating.

    The next call receives what the cancelled one had not taken.
    """
    tensors = _Tensors(ground, nbytes)

    async def send() -> None:
        await sweeper.pause()
        await tensors.send()

    for way, receive, args in (
        ("of what is there", tensors.receive, ()),
        ("of what comes", tensors.receive, ()),
        ("by iterating", _next_of, (tensors.far,)),
    ):
        call: Any = receive
        async for cancel in sweeper.sweep(way):
            sending = asyncio.create_task(send())
            if way == "of what is there":
                await sending
            outcome = await cancel(call, *args)
            tensors.into.fill_(OVERWRITE)
            await sending
            if outcome.cancelled:
                expect_same(await tensors.far.recv_tensor(), tensors.contents)
            await tensors.near.flush()
            await ground.check_quiet()
            expect_overwritten(tensors.into)


@scenario("KVPipe.flush", kinds=OVER_LINKS)
async def a_flush(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Leaves no trace, and what was sent arrives."""
    tensors = _Tensors(ground, nbytes)
    async for cancel in sweeper.sweep():
        await tensors.send()
        await cancel(tensors.near.flush)
        await tensors.near.flush()
        await tensors.receive()


@scenario("KVPipe.aclose", kinds=OVER_LINKS, is_costly=True)
async def a_pipes_end(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """The peer has received everything, or is told that it has not."""

    async def receive(far: Pipe) -> list[torch.Tensor | None]:
        await sweeper.pause()
        return [tensor async for tensor in far]

    async for cancel in sweeper.sweep():
        async with _left_open(ground) as (near, far):
            for _ in range(2):
                await near.send_tensor(noise(nbytes, 1))
            receiving = asyncio.create_task(receive(far))
            outcome = await cancel(near.aclose)
            if not cancel.has_begun:
                near.abort()
            (found,) = await asyncio.gather(receiving, return_exceptions=True)
            if isinstance(found, PeerLost):
                expect(outcome.cancelled, repr(found))
            elif isinstance(found, BaseException):
                raise found
            else:
                expect(len(found) == 2, f"{len(found)} of 2 tensors, and a goodbye")
            with contextlib.suppress(EndOfStream, PeerLost):
                await near.send_tensor(None)
                raise AssertionError("a closed pipe has sent")


@contextlib.asynccontextmanager
async def _left_open(ground: Ground) -> AsyncIterator[tuple[Pipe, Pipe]]:
    """What its ends have been through by then is no error of theirs."""
    with contextlib.suppress(PipeBroken):
        async with open_pipe_pair(ground.scheme, lanes=1, **ground.options) as ends:
            yield ends


@scenario("PipeListener.aclose", kinds=OVER_LINKS, sizes=(SMALL,), is_costly=True)
async def a_pipe_listeners_end(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Whoever waits in ``accept`` is told."""
    async for cancel in sweeper.sweep():
        listener = listen_pipe(new_url(ground.scheme), **ground.options)
        await listener.__aenter__()
        accepting = asyncio.create_task(listener.accept())
        await ground.link_to(listener.url)
        await cancel(listener.aclose)
        if not cancel.has_begun:
            await listener.aclose()
        await expect_error(EndOfStream, accepting)
