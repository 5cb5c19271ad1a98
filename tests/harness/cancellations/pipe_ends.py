"""The end of a pipe: after everything, or told to be before it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import torch

from asynckv.errors import EndOfStream, PeerLost, PipeBroken
from asynckv.pipes.endpoints import PipeListener, listen_pipe
from asynckv.pipes.pipe import Pipe
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect, expect_error, noise
from asynckv.testing.pairs import new_url, open_pipe_pair
from harness.cancellations.entries import LARGE, SMALL
from harness.cancellations.grounds import OVER_LINKS, Ground
from harness.cancellations.partners import Closing
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper

__all__ = ("PIPE_ENDS", "a_pipe_listeners_end", "a_pipes_end")


async def a_pipes_end(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """The peer has received everything, or is told that it has not."""
    stack = contextlib.AsyncExitStack()
    near: Pipe
    far: Pipe
    closing: Closing
    receiving: asyncio.Task[list[torch.Tensor | None]]

    async def before() -> None:
        nonlocal near, far, receiving, closing
        closing = Closing()
        opened = open_pipe_pair(ground.scheme, lanes=1, **ground.options)
        near, far = await stack.enter_async_context(_left_open(opened))
        for _ in range(2):
            await near.send_tensor(noise(nbytes, 1))
        receiving = asyncio.create_task(receive())

    async def receive() -> list[torch.Tensor | None]:
        await sweeper.pause()
        return [tensor async for tensor in far]

    async def check(outcome: Outcome[None]) -> None:
        if not closing.has_begun:
            near.abort()
        (found,) = await asyncio.gather(receiving, return_exceptions=True)
        if not isinstance(found, PeerLost):
            expect(not isinstance(found, BaseException), repr(found))
            expect(len(found) == 2, f"{len(found)} of 2 tensors, and a goodbye")  # type: ignore[arg-type]
        expect(outcome.cancelled or not isinstance(found, PeerLost), repr(found))
        with contextlib.suppress(EndOfStream, PeerLost):
            await near.send_tensor(None)
            raise AssertionError("a closed pipe has sent")
        await stack.aclose()
        await ground.check_quiet()

    async with stack:
        call = f"the end of a pipe with {nbytes} bytes"
        await sweeper.sweep(call, lambda: closing.run(near.aclose), check, before)


@contextlib.asynccontextmanager
async def _left_open(
    opened: contextlib.AbstractAsyncContextManager[tuple[Pipe, Pipe]],
) -> AsyncIterator[tuple[Pipe, Pipe]]:
    """What its ends have been through by then is no error of theirs."""
    with contextlib.suppress(PipeBroken):
        async with opened as ends:
            yield ends


async def a_pipe_listeners_end(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Whoever waits in ``accept`` is told."""
    listener: PipeListener
    closing: Closing
    accepting: asyncio.Task[Pipe]

    async def before() -> None:
        nonlocal listener, accepting, closing
        closing = Closing()
        listener = listen_pipe(new_url(ground.scheme), **ground.options)
        await listener.__aenter__()
        accepting = asyncio.create_task(listener.accept())
        await ground.link_to(listener.url)
        await sweeper.pause()

    async def check(outcome: Outcome[None]) -> None:
        if not closing.has_begun:
            await listener.aclose()
        await expect_error(EndOfStream, accepting)
        await ground.check_quiet()

    call = "a pipe listener's end"
    await sweeper.sweep(call, lambda: closing.run(listener.aclose), check, before)


PIPE_ENDS: Final = tuple(
    Scenario(run, covers, OVER_LINKS, sizes, is_costly=True)
    for run, covers, sizes in (
        (a_pipes_end, ("KVPipe.aclose",), (SMALL, LARGE)),
        (a_pipe_listeners_end, ("PipeListener.aclose",), (SMALL,)),
    )
)
