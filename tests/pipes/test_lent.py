"""What is sent with ``copy=False``: from where the caller has it, and until when."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import pytest
import torch

from asynckv.errors import EndOfStream, PeerLost, PipeBroken
from asynckv.pipes.pipe import Pipe
from asynckv.testing import CancelMode, Outcome, sweep_cancellation, until
from asynckv.testing.expectations import expect_same, noise
from asynckv.testing.pairs import SCHEMES, Scheme, open_pipe_pair
from asynckv.testing.pipe_checks import receive_many, send_many
from asynckv.transports.inline import InlineTransport

pytestmark = pytest.mark.both_loops

LARGE: Final = 2**18
LONG: Final = 2**25
OVER_SOCKETS: Final[tuple[Scheme, ...]] = ("tcp", "unix")


def is_read(pipe: Pipe) -> bool:
    """Is a lane of this side at any of its first transfers?"""
    payload = pipe._link.payload
    assert isinstance(payload, InlineTransport)
    return any(payload._lanes.is_touched(transfer) for transfer in range(20))


async def is_first_or_lost(pipe: Pipe, first: torch.Tensor) -> None:
    """What comes is as it was lent, or does not come."""
    with contextlib.suppress(PeerLost, EndOfStream):
        expect_same(await pipe.recv_tensor(), first)


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_what_is_lent_arrives_and_is_the_callers_after_a_flush(
    scheme: Scheme,
) -> None:
    plain = noise(LARGE, 1)
    tensors = [
        plain,
        plain[:64],
        plain[::2],
        plain.view(torch.bfloat16).view(2, -1),
        plain.view(2, -1).t(),
        torch.ones(LARGE // 4, requires_grad=True),
    ]
    async with open_pipe_pair(scheme, max_bytes="16MiB") as (near, far):
        for tensor in tensors:
            await near.send_tensor(tensor, copy=False)
        await near.flush()
        before = [tensor.detach().clone() for tensor in tensors]
        plain.zero_()
        for tensor in before:
            expect_same(await far.recv_tensor(), tensor)


@pytest.mark.parametrize("scheme", OVER_SOCKETS)
async def test_what_is_lent_is_not_copied(scheme: Scheme) -> None:
    async with open_pipe_pair(scheme) as (near, far):
        for _ in range(4):
            await near.send_tensor(noise(LARGE, 0))
        await near.flush()
        lent = noise(LARGE, 1)
        await near.send_tensor(lent, copy=False)  # for which the peer has no room yet
        lent.fill_(7)
        for _ in range(4):
            await far.recv_tensor()
        expect_same(await far.recv_tensor(), torch.full_like(lent, 7))


async def test_in_one_process_what_is_lent_is_copied_all_the_same() -> None:
    async with open_pipe_pair("mem") as (near, far):
        lent = noise(LARGE, 1)
        await near.send_tensor(lent, copy=False)
        lent.fill_(7)
        expect_same(await far.recv_tensor(), noise(LARGE, 1))


@pytest.mark.parametrize("filled", [0, 8])
@pytest.mark.parametrize("nbytes", [64, LARGE])
async def test_a_cancelled_send_has_lent_nothing(filled: int, nbytes: int) -> None:
    source, room = noise(nbytes, 1), list[asyncio.Task[None]]()
    async with open_pipe_pair("unix") as (near, far):

        async def before() -> None:
            source.copy_(noise(nbytes, 1))
            await send_many(near, filled)
            if filled:  # room comes while the send waits for it
                room.append(asyncio.create_task(receive_many(far, filled)))

        async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
            if outcome.cancelled:
                source.fill_(0)
            if room:
                await room.pop()
            await near.send_tensor(None)
            if not outcome.cancelled:
                expect_same(await far.recv_tensor(), noise(nbytes, 1))
            assert await far.recv_tensor() is None
            await near.flush()
            assert near.statistics().in_flight_bytes == 0

        await sweep_cancellation(
            lambda: near.send_tensor(source, copy=False), check, before=before
        )


@pytest.mark.parametrize("scheme", OVER_SOCKETS)
async def test_a_cancelled_flush_leaves_nothing_that_reads_what_was_lent(
    scheme: Scheme,
) -> None:
    stack: list[contextlib.AsyncExitStack] = []
    pairs: list[tuple[Pipe, Pipe]] = []
    source, first = noise(LONG, 1), noise(LONG, 1)

    async def before() -> None:
        source.copy_(first)
        stack.append(contextlib.AsyncExitStack())
        pair = open_pipe_pair(scheme, max_bytes=4 * LONG)
        pairs.append(await stack[-1].enter_async_context(pair))
        await pairs[-1][0].send_tensor(source, copy=False)

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        near, far = pairs[-1]
        if not k:  # a task that was cancelled before it began has done nothing
            await near.flush()
        assert not is_read(near)
        source.fill_(0)
        if k and outcome.cancelled:
            await is_first_or_lost(far, first)
        else:
            expect_same(await far.recv_tensor(), first)
        near.abort()
        await stack.pop().aclose()

    await sweep_cancellation(lambda: pairs[-1][0].flush(), check, before=before)


async def test_a_flush_that_is_cancelled_when_all_has_left_loses_nothing() -> None:
    async with open_pipe_pair() as (near, far):
        await near.send_tensor(noise(LARGE, 1), copy=False)
        await near.flush()
        await near.send_tensor(noise(LARGE, 2))

        async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
            await near.send_tensor(None)

        await sweep_cancellation(near.flush, check)
        await near.flush()
        for seed in (1, 2):
            expect_same(await far.recv_tensor(), noise(LARGE, seed))


@pytest.mark.parametrize("scheme", OVER_SOCKETS)
@pytest.mark.parametrize("end", ["abort", "aclose", "lost"])
async def test_after_any_end_nothing_reads_what_was_lent(
    scheme: Scheme, end: str
) -> None:
    source, first = noise(LONG, 1), noise(LONG, 1)
    async with open_pipe_pair(scheme, max_bytes=4 * LONG) as (near, far):
        for _ in range(3):
            await near.send_tensor(source, copy=False)
        await until(lambda: is_read(near))
        if end == "aclose":
            await near.aclose()
        elif end == "abort":
            near.abort()
        else:
            far.abort()
            with pytest.raises(PipeBroken):
                await near.flush()
        assert not is_read(near)
        source.fill_(0)
        if end != "lost":
            await is_first_or_lost(far, first)


async def test_a_cancelled_close_leaves_nothing_that_reads_what_was_lent() -> None:
    stack: list[contextlib.AsyncExitStack] = []
    pairs: list[tuple[Pipe, Pipe]] = []
    source, first = noise(LONG, 1), noise(LONG, 1)

    async def before() -> None:
        source.copy_(first)
        stack.append(contextlib.AsyncExitStack())
        pair = open_pipe_pair("unix", max_bytes=4 * LONG)
        pairs.append(await stack[-1].enter_async_context(pair))
        await pairs[-1][0].send_tensor(source, copy=False)

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        near, far = pairs[-1]
        if not k:
            near.abort()
        assert not is_read(near)
        source.fill_(0)
        await is_first_or_lost(far, first)
        await stack.pop().aclose()

    await sweep_cancellation(lambda: pairs[-1][0].aclose(), check, before=before)
