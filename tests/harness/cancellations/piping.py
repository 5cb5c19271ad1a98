"""Pipes: a cancelled send has sent nothing, a cancelled receive has taken nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

import torch

from asynckv.pipes.pipe import Pipe
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect, expect_same, noise
from harness.cancellations.entries import OVERWRITE, expect_overwritten
from harness.cancellations.grounds import OVER_LINKS, PIPE_BYTES, Ground
from harness.cancellations.partners import Partner
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper

__all__ = (
    "PIPING",
    "a_flush",
    "a_receive",
    "a_send",
    "a_send_that_waits_for_room",
    "an_iteration",
)


def _ends(ground: Ground) -> tuple[Pipe, Pipe]:
    if ground.pipe is None:
        raise RuntimeError("there is no pipe")
    return ground.pipe


class _Tensors:
    """One tensor at a time, in memory that its owner writes to afterwards."""

    def __init__(self, ground: Ground, nbytes: int) -> None:
        self.near, self.far = _ends(ground)
        self.contents = noise(nbytes, 1)
        self.source = torch.zeros(nbytes, dtype=torch.uint8)
        self.into = torch.zeros(nbytes, dtype=torch.uint8)

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


async def _has_sent_all_or_nothing(
    ground: Ground, tensors: _Tensors, outcome: Outcome[None]
) -> None:
    await tensors.near.send_tensor(None)
    if not outcome.cancelled:
        await tensors.receive()
    expect(await tensors.far.recv_tensor() is None, "a cancelled send has sent")
    await tensors.near.flush()
    await ground.check_quiet()


async def a_send(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Into a pipe that has room."""
    tensors = _Tensors(ground, nbytes)

    async def check(outcome: Outcome[None]) -> None:
        await _has_sent_all_or_nothing(ground, tensors, outcome)

    await sweeper.sweep(f"a send of {nbytes} bytes", tensors.send, check)


async def a_send_that_waits_for_room(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """Which comes when the peer receives, soon or in that very tick."""
    tensors = _Tensors(ground, nbytes)
    near, far = _ends(ground)
    large = torch.zeros(PIPE_BYTES, dtype=torch.uint8)
    partner: Partner

    async def before() -> None:
        nonlocal partner
        for _ in range(2):  # one is received ahead, the other is in flight
            await near.send_tensor(large)
        partner = Partner(
            sweeper, lambda: near.statistics().waiting_senders > 0, receive
        )

    async def receive() -> None:
        for _ in range(2):
            await far.recv_tensor()

    async def check(outcome: Outcome[None]) -> None:
        await partner.ended()
        await _has_sent_all_or_nothing(ground, tensors, outcome)

    await sweeper.sweep(
        f"a send of {nbytes} bytes that waits", tensors.send, check, before
    )


async def _cancel_receives(
    ground: Ground,
    sweeper: Sweeper,
    tensors: _Tensors,
    receive: tuple[str, Any],
    is_there: bool,
) -> None:
    """``receive`` is cancelled; the next call receives what it had not taken."""
    sending: asyncio.Task[None]

    async def send() -> None:
        await sweeper.pause()
        await tensors.send()

    async def before() -> None:
        nonlocal sending
        sending = asyncio.create_task(send())
        if is_there:
            await sending

    async def check(outcome: Outcome[Any]) -> None:
        tensors.into.fill_(OVERWRITE)
        await sending
        if outcome.cancelled:
            expect_same(await tensors.far.recv_tensor(), tensors.contents)
        await tensors.near.flush()
        await ground.check_quiet()
        expect_overwritten(tensors.into)

    name, operation = receive
    nbytes = tensors.contents.nbytes
    what = "is there" if is_there else "comes"
    await sweeper.sweep(
        f"{name} of {nbytes} bytes: it {what}", operation, check, before
    )


async def a_receive(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Into memory of the caller, of what is there and of what comes."""
    tensors = _Tensors(ground, nbytes)
    for is_there in (True, False):
        call = "a receive", tensors.receive
        await _cancel_receives(ground, sweeper, tensors, call, is_there)


async def an_iteration(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """As a receive."""
    tensors = _Tensors(ground, nbytes)

    def following() -> Coroutine[Any, Any, torch.Tensor | None]:
        return _next_of(tensors.far)

    tensors.into.fill_(OVERWRITE)
    call = "an iteration", following
    await _cancel_receives(ground, sweeper, tensors, call, False)


async def _next_of(pipe: Pipe) -> torch.Tensor | None:
    async for tensor in pipe:
        return tensor
    raise AssertionError("the pipe has ended")


async def a_flush(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Leaves no trace, and what was sent arrives."""
    tensors = _Tensors(ground, nbytes)

    async def check(outcome: Outcome[None]) -> None:
        await tensors.near.flush()
        await tensors.receive()
        await ground.check_quiet()

    await sweeper.sweep(
        f"a flush of {nbytes} bytes", tensors.near.flush, check, tensors.send
    )


PIPING: Final = (
    Scenario(a_send, ("KVPipe.send_tensor",), OVER_LINKS),
    Scenario(a_send_that_waits_for_room, ("KVPipe.send_tensor",), OVER_LINKS),
    Scenario(a_receive, ("KVPipe.recv_tensor",), OVER_LINKS),
    Scenario(an_iteration, ("KVPipe.__anext__",), OVER_LINKS),
    Scenario(a_flush, ("KVPipe.flush",), OVER_LINKS),
)
