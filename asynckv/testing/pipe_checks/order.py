"""The order of tensors and of those who wait, and what bounds them."""

from __future__ import annotations

import asyncio
from typing import Final

import torch

from asynckv.abc import KVPipe
from asynckv.testing.blocked import until_blocked
from asynckv.testing.expectations import expect, expect_same, noise
from asynckv.testing.pipe_checks.values import LARGE, PIPE_BYTES, PipeCheck, send_many

__all__ = (
    "ORDER_CHECKS",
    "a_full_pipe_makes_senders_wait_in_turn",
    "a_tensor_above_the_bound_goes_alone",
    "both_sides_may_send_before_either_receives",
    "receivers_are_served_in_turn",
    "sending_waits_for_no_receive",
    "tensors_come_in_the_order_of_the_sends",
)


async def tensors_come_in_the_order_of_the_sends(near: KVPipe, far: KVPipe) -> None:
    """Small ones do not overtake large ones, whoever sends them."""
    sizes = [64, LARGE, 1, 2**17, 0, 2**16, 2**16 + 1] * 3
    sends = [
        asyncio.create_task(near.send_tensor(noise(nbytes, seed)))
        for seed, nbytes in enumerate(sizes)
    ]
    for seed, nbytes in enumerate(sizes):
        expect_same(await far.recv_tensor(), noise(nbytes, seed))
    await asyncio.gather(*sends)


async def sending_waits_for_no_receive(near: KVPipe, far: KVPipe) -> None:
    """What fits is in the peer's memory before it asks for anything."""
    for seed in range(4):
        await near.send_tensor(noise(LARGE, seed))
    await near.flush()
    for seed in range(4):
        expect_same(await far.recv_tensor(), noise(LARGE, seed))


async def a_full_pipe_makes_senders_wait_in_turn(near: KVPipe, far: KVPipe) -> None:
    """Bytes in flight are bounded, and room is given in the order of the calls."""
    sends = [
        asyncio.create_task(near.send_tensor(noise(nbytes, seed)))
        for seed, nbytes in enumerate([LARGE] * 12 + [1])
    ]
    # As many as both bounds hold: the peer's memory, and what is on its way.
    await asyncio.wait(sends[:8])
    await until_blocked(*sends[8:])
    expect(not any(task.done() for task in sends[8:]), "the bound was passed")
    for seed in range(12):
        expect_same(await far.recv_tensor(), noise(LARGE, seed))
    expect_same(await far.recv_tensor(), noise(1, 12))
    await asyncio.gather(*sends)


async def a_tensor_above_the_bound_goes_alone(near: KVPipe, far: KVPipe) -> None:
    """It waits until nothing else is in flight, and nothing goes beside it."""
    huge = noise(3 * PIPE_BYTES, 5)
    await near.send_tensor(noise(LARGE, 1))
    await asyncio.wait_for(near.send_tensor(huge), 5)
    last = asyncio.create_task(near.send_tensor(noise(LARGE, 2)))
    expect_same(await far.recv_tensor(), noise(LARGE, 1))
    await until_blocked(last)
    expect(not last.done(), "nothing goes beside what is above the bound")
    expect_same(await far.recv_tensor(torch.zeros_like(huge)), huge)
    expect_same(await far.recv_tensor(), noise(LARGE, 2))
    await last


async def both_sides_may_send_before_either_receives(near: KVPipe, far: KVPipe) -> None:
    """Sending never blocks receiving: no order of the two is needed."""

    async def exchange(pipe: KVPipe) -> None:
        sending = asyncio.create_task(send_many(pipe, 16))
        for seed in range(16):
            expect_same(await pipe.recv_tensor(), noise(LARGE, seed))
        await sending

    for pipe in (near, far):
        await send_many(pipe, 4)
    for pipe in (near, far):
        await pipe.flush()
        for seed in range(4):
            expect_same(await pipe.recv_tensor(), noise(LARGE, seed))
    await asyncio.gather(exchange(near), exchange(far))


async def receivers_are_served_in_turn(near: KVPipe, far: KVPipe) -> None:
    """Who called first gets the first tensor; one that is cancelled leaves its turn."""
    tasks = [asyncio.create_task(far.recv_tensor()) for _ in range(4)]
    await until_blocked(*tasks)
    tasks[1].cancel()
    await asyncio.wait({tasks[1]})
    for seed in range(3):
        await near.send_tensor(noise(64, seed))
    for seed, task in enumerate((tasks[0], tasks[2], tasks[3])):
        expect_same(await task, noise(64, seed))


ORDER_CHECKS: Final[tuple[PipeCheck, ...]] = (
    tensors_come_in_the_order_of_the_sends,
    sending_waits_for_no_receive,
    a_full_pipe_makes_senders_wait_in_turn,
    a_tensor_above_the_bound_goes_alone,
    both_sides_may_send_before_either_receives,
    receivers_are_served_in_turn,
)
