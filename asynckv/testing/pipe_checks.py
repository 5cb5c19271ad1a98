"""What every pipe keeps, over any transport: small checks to run on yours.

Each check gets the two sides of a fresh pipe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeAlias

import torch

from asynckv.abc import KVPipe
from asynckv.errors import EndOfStream, PeerLost, PipeBroken
from asynckv.tensors.views import dtype_of
from asynckv.testing.blocked import until_blocked
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import (
    CANCEL_MODES,
    expect,
    expect_error,
    expect_same,
    naming,
    noise,
)
from asynckv.types import DTYPE_NBYTES

__all__ = (
    "CANCELLING_CHECKS",
    "ENDING_CHECKS",
    "LARGE",
    "ORDER_CHECKS",
    "PIPE_BYTES",
    "PIPE_CHECKS",
    "SIZES",
    "TENSOR_CHECKS",
    "MakePipePair",
    "PipeCheck",
    "a_cancelled_flush_leaves_no_trace",
    "a_cancelled_receive_has_taken_nothing",
    "a_cancelled_receive_leaves_into_alone",
    "a_cancelled_send_has_sent_nothing",
    "a_closed_pipe_says_so",
    "a_full_pipe_makes_senders_wait_in_turn",
    "a_lost_peer_is_an_error",
    "a_tensor_above_the_bound_goes_alone",
    "a_tensor_comes_back_as_it_was_sent",
    "a_tensor_lands_in_into",
    "a_tensor_may_be_overwritten_after_the_send",
    "an_into_that_does_not_fit_is_refused",
    "any_shape_and_stride_can_be_sent",
    "both_sides_may_send_before_either_receives",
    "check_pipe",
    "none_is_a_value",
    "receive_many",
    "receivers_are_served_in_turn",
    "send_many",
    "sending_waits_for_no_receive",
    "tensors_come_in_the_order_of_the_sends",
    "the_goodbye_comes_after_everything",
    "what_cannot_be_sent_is_refused",
)


PIPE_BYTES: Final = 2**20
"""The ``max_bytes`` that the pipes of :func:`check_pipe` have."""

PipeCheck: TypeAlias = Callable[[KVPipe, KVPipe], Awaitable[None]]
"""Called with the two sides of a pipe."""

LARGE: Final = PIPE_BYTES // 4
SIZES: Final = (64, LARGE)


async def send_many(pipe: KVPipe, count: int) -> None:
    """Send so many tensors of :data:`LARGE` bytes."""
    for seed in range(count):
        await pipe.send_tensor(noise(LARGE, seed))


async def receive_many(pipe: KVPipe, count: int) -> None:
    """Receive what :func:`send_many` sends."""
    for seed in range(count):
        expect_same(await pipe.recv_tensor(), noise(LARGE, seed))


async def a_tensor_comes_back_as_it_was_sent(near: KVPipe, far: KVPipe) -> None:
    """Bytes, dtype and shape, for every dtype, small and large."""
    for seed, name in enumerate(DTYPE_NBYTES):
        for nbytes in (48, 3 * 2**15):
            plain = noise(nbytes, seed)
            tensor = plain > 99 if name == "bool" else plain.view(dtype_of(name))
            await near.send_tensor(tensor.view(3, -1))
            expect_same(await far.recv_tensor(), tensor.view(3, -1))


async def any_shape_and_stride_can_be_sent(near: KVPipe, far: KVPipe) -> None:
    """0-d, empty, 14 dimensions, transposed, sliced, expanded, conjugate."""
    large = noise(LARGE, 1)
    wave = noise(256, 2).float().view(torch.complex64)
    for tensor in (
        torch.tensor(7.5),
        torch.empty(0),
        torch.empty(3, 0, 2, dtype=torch.bfloat16),
        noise(2**14, 0).view((2,) * 14),
        large.view(2, -1, 2, 64).transpose(1, 3),
        large[::3],
        noise(16, 0).view(4, 4).t(),
        torch.tensor([1, 2]).expand(3, 2),
        wave.conj(),
        wave.conj().imag,
        torch.ones(3, requires_grad=True),
    ):
        await near.send_tensor(tensor)
        expect_same(await far.recv_tensor(), tensor.detach())


async def none_is_a_value(near: KVPipe, far: KVPipe) -> None:
    """It comes in its turn, also in an iteration, and leaves ``into`` alone."""
    for tensor in (None, torch.ones(1), None):
        await near.send_tensor(tensor)
    into = torch.zeros(1)
    expect(await far.recv_tensor(into) is None, "the first was None")
    expect_same(await anext(far), torch.ones(1))
    expect(await anext(far) is None, "the third was None")
    expect_same(into, torch.zeros(1))


async def a_tensor_may_be_overwritten_after_the_send(near: KVPipe, far: KVPipe) -> None:
    """What was sent is a copy, and what was received is the receiver's own."""
    for nbytes in SIZES:
        tensor = noise(nbytes, 3)
        for _ in range(2):
            await near.send_tensor(tensor)
        tensor.zero_()
        first = await far.recv_tensor()
        expect_same(first, noise(nbytes, 3))
        if first is not None:
            first.zero_()
        expect_same(await far.recv_tensor(), noise(nbytes, 3))


async def a_tensor_lands_in_into(near: KVPipe, far: KVPipe) -> None:
    """``into`` is filled and returned."""
    for nbytes in (0, *SIZES):
        into = torch.zeros(nbytes, dtype=torch.uint8)
        await near.send_tensor(noise(nbytes, 1))
        expect(await far.recv_tensor(into) is into, "into is returned")
        expect_same(into, noise(nbytes, 1))


async def an_into_that_does_not_fit_is_refused(near: KVPipe, far: KVPipe) -> None:
    """Another shape, another dtype, memory with gaps: the tensor stays."""
    await near.send_tensor(torch.ones(4, 4))
    for into in (torch.zeros(16), torch.zeros(4, 4).int(), torch.zeros(4, 8)[:, ::2]):
        await expect_error(ValueError, far.recv_tensor(into))
        expect(not into.any().item(), "it is untouched")
    expect_same(await far.recv_tensor(), torch.ones(4, 4))


async def what_cannot_be_sent_is_refused(near: KVPipe, far: KVPipe) -> None:
    """Too many dimensions, sparse, on no CPU: and the pipe goes on."""
    for tensor in (
        torch.ones((1,) * 15),
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
    ):
        await expect_error(ValueError, near.send_tensor(tensor))
    await near.send_tensor(torch.ones(1))
    expect_same(await far.recv_tensor(), torch.ones(1))


TENSOR_CHECKS: Final[tuple[PipeCheck, ...]] = (
    a_tensor_comes_back_as_it_was_sent,
    any_shape_and_stride_can_be_sent,
    none_is_a_value,
    a_tensor_may_be_overwritten_after_the_send,
    a_tensor_lands_in_into,
    an_into_that_does_not_fit_is_refused,
    what_cannot_be_sent_is_refused,
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
    await send_many(near, 4)
    await near.flush()
    await receive_many(far, 4)


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
    await receive_many(far, 12)
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
        await receive_many(pipe, 16)
        await sending

    for pipe in (near, far):
        await send_many(pipe, 4)
    for pipe in (near, far):
        await pipe.flush()
        await receive_many(pipe, 4)
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
    await send_many(near, 8)
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


MakePipePair: TypeAlias = Callable[
    [], AbstractAsyncContextManager[tuple[KVPipe, KVPipe]]
]
"""Opens a pipe; both its sides have a ``max_bytes`` of 1 MiB."""

PIPE_CHECKS: Final[tuple[PipeCheck, ...]] = (
    *TENSOR_CHECKS,
    *ORDER_CHECKS,
    *ENDING_CHECKS,
    *CANCELLING_CHECKS,
)


async def check_pipe(make_pair: MakePipePair) -> None:
    """Run every check of :data:`PIPE_CHECKS`, each on a pipe of its own.

    :raises AssertionError: the pipe breaks the contract; a note names the check
    """
    for check in PIPE_CHECKS:
        with naming(check):
            async with make_pair() as (near, far):
                await check(near, far)
