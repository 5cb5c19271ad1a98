"""Every operation, cancelled at each of its suspensions."""

from __future__ import annotations

import asyncio
from typing import Final

import torch

from asynckv.abc import KVPipe
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import CANCEL_MODES, expect, expect_same, noise
from asynckv.testing.pipe_checks.values import (
    LARGE,
    SIZES,
    PipeCheck,
    receive_many,
    send_many,
)

__all__ = (
    "CANCELLING_CHECKS",
    "a_cancelled_flush_leaves_no_trace",
    "a_cancelled_receive_has_taken_nothing",
    "a_cancelled_receive_leaves_into_alone",
    "a_cancelled_send_has_sent_nothing",
)


async def a_cancelled_send_has_sent_nothing(near: KVPipe, far: KVPipe) -> None:
    """Nor is the tensor read any more; also while it waits for room."""
    for filled, nbytes in ((0, 64), (0, LARGE), (8, LARGE)):
        await _cancel_sends(near, far, filled, nbytes)


async def a_cancelled_receive_has_taken_nothing(near: KVPipe, far: KVPipe) -> None:
    """The next call returns that tensor."""
    for nbytes in SIZES:
        await _cancel_receives(near, far, nbytes)


async def a_cancelled_receive_leaves_into_alone(near: KVPipe, far: KVPipe) -> None:
    """``into`` is the caller's again, and the tensor is still in the stream."""
    for nbytes in SIZES:
        await _cancel_receives_into(near, far, nbytes)


async def a_cancelled_flush_leaves_no_trace(near: KVPipe, far: KVPipe) -> None:
    """What was sent arrives, and the next flush returns."""

    async def before() -> None:
        await near.send_tensor(noise(LARGE, 1))

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        await near.flush()
        expect_same(await far.recv_tensor(), noise(LARGE, 1))

    await sweep_cancellation(near.flush, check, before=before, modes=CANCEL_MODES)


CANCELLING_CHECKS: Final[tuple[PipeCheck, ...]] = (
    a_cancelled_send_has_sent_nothing,
    a_cancelled_receive_has_taken_nothing,
    a_cancelled_receive_leaves_into_alone,
    a_cancelled_flush_leaves_no_trace,
)


async def _cancel_sends(near: KVPipe, far: KVPipe, filled: int, nbytes: int) -> None:
    source = noise(nbytes, 1)
    room: list[asyncio.Task[None]] = []

    async def before() -> None:
        source.copy_(noise(nbytes, 1))
        await send_many(near, filled)
        if filled:  # room comes while the send waits for it
            room.append(asyncio.create_task(receive_many(far, filled)))

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        source.fill_(0)
        if room:
            await room.pop()
        await near.send_tensor(None)
        if not outcome.cancelled:
            expect_same(await far.recv_tensor(), noise(nbytes, 1))
        expect(await far.recv_tensor() is None, "a cancelled send has sent something")
        await send_many(near, 4)  # the whole bound is free again
        await near.flush()
        await receive_many(far, 4)

    await sweep_cancellation(
        lambda: near.send_tensor(source), check, before=before, modes=CANCEL_MODES
    )


async def _cancel_receives(near: KVPipe, far: KVPipe, nbytes: int) -> None:
    sends: list[asyncio.Task[None]] = []

    async def before() -> None:
        sends.append(asyncio.create_task(near.send_tensor(noise(nbytes, 1))))

    async def check(
        k: int, mode: CancelMode, outcome: Outcome[torch.Tensor | None]
    ) -> None:
        found = await far.recv_tensor() if outcome.cancelled else outcome.value
        expect_same(found, noise(nbytes, 1))
        await sends.pop()

    await sweep_cancellation(far.recv_tensor, check, before=before, modes=CANCEL_MODES)


async def _cancel_receives_into(near: KVPipe, far: KVPipe, nbytes: int) -> None:
    into = torch.zeros(nbytes, dtype=torch.uint8)
    sends: list[asyncio.Task[None]] = []

    async def before() -> None:
        sends.append(asyncio.create_task(near.send_tensor(noise(nbytes, 1))))

    async def check(
        k: int, mode: CancelMode, outcome: Outcome[torch.Tensor | None]
    ) -> None:
        found = into.clone()
        into.fill_(9)
        if outcome.cancelled:
            await far.recv_tensor(found)
        expect_same(found, noise(nbytes, 1))
        expect(bool((into == 9).all()), "into was written to afterwards")
        await sends.pop()

    await sweep_cancellation(
        lambda: far.recv_tensor(into), check, before=before, modes=CANCEL_MODES
    )
