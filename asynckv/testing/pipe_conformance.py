"""What every pipe keeps, over any transport: small checks to run on yours.

Each check gets the two sides of a fresh pipe.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeAlias

import numpy
import torch

from asynckv.abc import KVPipe
from asynckv.errors import EndOfStream, PeerLost, PipeBroken
from asynckv.tensors.views import bytes_of, dtype_of
from asynckv.testing.blocked import until_blocked
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.types import DTYPE_NBYTES

__all__ = (
    "PIPE_BYTES",
    "PIPE_CHECKS",
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
    "receivers_are_served_in_turn",
    "sending_waits_for_no_receive",
    "tensors_come_in_the_order_of_the_sends",
    "the_goodbye_comes_after_everything",
    "what_cannot_be_sent_is_refused",
)

PIPE_BYTES: Final = 2**20
"""The ``max_bytes`` that the pipes of :func:`check_pipe` have."""

PipeCheck: TypeAlias = Callable[[KVPipe, KVPipe], Awaitable[None]]
MakePipePair: TypeAlias = Callable[
    [], AbstractAsyncContextManager[tuple[KVPipe, KVPipe]]
]
"""Opens a pipe; both its sides have a ``max_bytes`` of :data:`PIPE_BYTES`."""

_MODES: Final[tuple[CancelMode, ...]] = ("task", "scope", "completion")
_LARGE: Final = PIPE_BYTES // 4
_SIZES: Final = (64, _LARGE)


async def check_pipe(make_pair: MakePipePair) -> None:
    """Run every check of :data:`PIPE_CHECKS`, each on a pipe of its own.

    :raises AssertionError: the pipe breaks the contract; a note names the check
    """
    for check in PIPE_CHECKS:
        try:
            async with make_pair() as (near, far):
                await check(near, far)
        except Exception as exc:
            exc.add_note(f"in {getattr(check, '__name__', check)}")
            raise


async def a_tensor_comes_back_as_it_was_sent(near: KVPipe, far: KVPipe) -> None:
    """Bytes, dtype and shape, for every dtype, small and large."""
    for seed, name in enumerate(DTYPE_NBYTES):
        for nbytes in (48, 3 * 2**15):
            noise = _noise(nbytes, seed)
            tensor = noise > 99 if name == "bool" else noise.view(dtype_of(name))
            await near.send_tensor(tensor.view(3, -1))
            _same(await far.recv_tensor(), tensor.view(3, -1))


async def any_shape_and_stride_can_be_sent(near: KVPipe, far: KVPipe) -> None:
    """0-d, empty, 14 dimensions, transposed, sliced, expanded, conjugate."""
    large = _noise(_LARGE, 1)
    wave = _noise(256, 2).float().view(torch.complex64)
    for tensor in (
        torch.tensor(7.5),
        torch.empty(0),
        torch.empty(3, 0, 2, dtype=torch.bfloat16),
        _noise(2**14, 0).view((2,) * 14),
        large.view(2, -1, 2, 64).transpose(1, 3),
        large[::3],
        _noise(16, 0).view(4, 4).t(),
        torch.tensor([1, 2]).expand(3, 2),
        wave.conj(),
        wave.conj().imag,
        torch.ones(3, requires_grad=True),
    ):
        await near.send_tensor(tensor)
        _same(await far.recv_tensor(), tensor.detach())


async def none_is_a_value(near: KVPipe, far: KVPipe) -> None:
    """It comes in its turn, also in an iteration, and leaves ``into`` alone."""
    for tensor in (None, torch.ones(1), None):
        await near.send_tensor(tensor)
    into = torch.zeros(1)
    _check(await far.recv_tensor(into) is None, "the first was None")
    _same(await anext(far), torch.ones(1))
    _check(await anext(far) is None, "the third was None")
    _same(into, torch.zeros(1))


async def tensors_come_in_the_order_of_the_sends(near: KVPipe, far: KVPipe) -> None:
    """Small ones do not overtake large ones, whoever sends them."""
    sizes = [64, _LARGE, 1, 2**17, 0, 2**16, 2**16 + 1] * 3
    sends = [
        asyncio.create_task(near.send_tensor(_noise(nbytes, seed)))
        for seed, nbytes in enumerate(sizes)
    ]
    for seed, nbytes in enumerate(sizes):
        _same(await far.recv_tensor(), _noise(nbytes, seed))
    await asyncio.gather(*sends)


async def a_tensor_may_be_overwritten_after_the_send(near: KVPipe, far: KVPipe) -> None:
    """What was sent is a copy, and what was received is the receiver's own."""
    for nbytes in _SIZES:
        tensor = _noise(nbytes, 3)
        for _ in range(2):
            await near.send_tensor(tensor)
        tensor.zero_()
        first = await far.recv_tensor()
        _same(first, _noise(nbytes, 3))
        if first is not None:
            first.zero_()
        _same(await far.recv_tensor(), _noise(nbytes, 3))


async def sending_waits_for_no_receive(near: KVPipe, far: KVPipe) -> None:
    """What fits is in the peer's memory before it asks for anything."""
    for seed in range(4):
        await near.send_tensor(_noise(_LARGE, seed))
    await near.flush()
    for seed in range(4):
        _same(await far.recv_tensor(), _noise(_LARGE, seed))


async def a_full_pipe_makes_senders_wait_in_turn(near: KVPipe, far: KVPipe) -> None:
    """Bytes in flight are bounded, and room is given in the order of the calls."""
    sends = [
        asyncio.create_task(near.send_tensor(_noise(nbytes, seed)))
        for seed, nbytes in enumerate([_LARGE] * 12 + [1])
    ]
    # As many as both bounds hold: the peer's memory, and what is on its way.
    await asyncio.wait(sends[:8])
    await until_blocked(*sends[8:])
    _check(not any(task.done() for task in sends[8:]), "the bound was passed")
    for seed in range(12):
        _same(await far.recv_tensor(), _noise(_LARGE, seed))
    _same(await far.recv_tensor(), _noise(1, 12))
    await asyncio.gather(*sends)


async def a_tensor_above_the_bound_goes_alone(near: KVPipe, far: KVPipe) -> None:
    """It waits until nothing else is in flight, and nothing goes beside it."""
    huge = _noise(3 * PIPE_BYTES, 5)
    await near.send_tensor(_noise(_LARGE, 1))
    await asyncio.wait_for(near.send_tensor(huge), 5)
    last = asyncio.create_task(near.send_tensor(_noise(_LARGE, 2)))
    _same(await far.recv_tensor(), _noise(_LARGE, 1))
    await until_blocked(last)
    _check(not last.done(), "nothing goes beside what is above the bound")
    _same(await far.recv_tensor(torch.zeros_like(huge)), huge)
    _same(await far.recv_tensor(), _noise(_LARGE, 2))
    await last


async def both_sides_may_send_before_either_receives(near: KVPipe, far: KVPipe) -> None:
    """Sending never blocks receiving: no order of the two is needed."""

    async def exchange(pipe: KVPipe) -> None:
        sending = asyncio.create_task(_send_many(pipe, 16))
        for seed in range(16):
            _same(await pipe.recv_tensor(), _noise(_LARGE, seed))
        await sending

    for pipe in (near, far):
        await _send_many(pipe, 4)
    for pipe in (near, far):
        await pipe.flush()
        for seed in range(4):
            _same(await pipe.recv_tensor(), _noise(_LARGE, seed))
    await asyncio.gather(exchange(near), exchange(far))


async def receivers_are_served_in_turn(near: KVPipe, far: KVPipe) -> None:
    """Who called first gets the first tensor; one that is cancelled leaves its turn."""
    tasks = [asyncio.create_task(far.recv_tensor()) for _ in range(4)]
    await until_blocked(*tasks)
    tasks[1].cancel()
    await asyncio.wait({tasks[1]})
    for seed in range(3):
        await near.send_tensor(_noise(64, seed))
    for seed, task in enumerate((tasks[0], tasks[2], tasks[3])):
        _same(await task, _noise(64, seed))


async def a_tensor_lands_in_into(near: KVPipe, far: KVPipe) -> None:
    """``into`` is filled and returned."""
    for nbytes in (0, *_SIZES):
        into = torch.zeros(nbytes, dtype=torch.uint8)
        await near.send_tensor(_noise(nbytes, 1))
        _check(await far.recv_tensor(into) is into, "into is returned")
        _same(into, _noise(nbytes, 1))


async def an_into_that_does_not_fit_is_refused(near: KVPipe, far: KVPipe) -> None:
    """Another shape, another dtype, memory with gaps: the tensor stays."""
    await near.send_tensor(torch.ones(4, 4))
    for into in (torch.zeros(16), torch.zeros(4, 4).int(), torch.zeros(4, 8)[:, ::2]):
        await _expect(ValueError, far.recv_tensor(into))
        _check(not into.any().item(), "it is untouched")
    _same(await far.recv_tensor(), torch.ones(4, 4))


async def what_cannot_be_sent_is_refused(near: KVPipe, far: KVPipe) -> None:
    """Too many dimensions, sparse, on no CPU: and the pipe goes on."""
    for tensor in (
        torch.ones((1,) * 15),
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
    ):
        await _expect(ValueError, near.send_tensor(tensor))
    await near.send_tensor(torch.ones(1))
    _same(await far.recv_tensor(), torch.ones(1))


async def the_goodbye_comes_after_everything(near: KVPipe, far: KVPipe) -> None:
    """What was sent before can still be received; then the iteration ends."""
    await _send_many(near, 3)
    await near.send_tensor(None)
    await near.aclose()
    received = [tensor async for tensor in far]
    for seed in range(3):
        _same(received[seed], _noise(_LARGE, seed))
    _check(received[3:] == [None], "None came last")
    await _expect(EndOfStream, far.recv_tensor())
    await _expect(EndOfStream, far.send_tensor(None))
    await far.flush()


async def a_closed_pipe_says_so(near: KVPipe, far: KVPipe) -> None:
    """Also to those who wait, and it may be closed again."""
    receiving = asyncio.create_task(near.recv_tensor())
    await until_blocked(receiving)
    await near.aclose()
    await _expect(EndOfStream, receiving)
    for _ in range(2):
        await _expect(EndOfStream, near.recv_tensor())
        await _expect(EndOfStream, near.send_tensor(None))
        await near.aclose()


async def a_lost_peer_is_an_error(near: KVPipe, far: KVPipe) -> None:
    """What had come can be received; then it is ``PeerLost``, and never the end."""
    await far.send_tensor(torch.ones(1))
    await far.flush()
    for seed in range(8):
        await near.send_tensor(_noise(_LARGE, seed))
    sending = asyncio.create_task(near.send_tensor(_noise(_LARGE, 9)))
    await until_blocked(sending)
    far.abort()
    error = await _expect(PipeBroken, sending)
    _check(error.maybe_delivered >= 4, f"maybe_delivered: {error.maybe_delivered}")
    _same(await near.recv_tensor(), torch.ones(1))
    lost = await _expect(PeerLost, near.recv_tensor())
    _check(not isinstance(lost, PipeBroken), "receiving raises plain PeerLost")
    await _expect(PeerLost, anext(near))
    await _expect(PipeBroken, near.flush())


async def a_cancelled_send_has_sent_nothing(near: KVPipe, far: KVPipe) -> None:
    """Nor is the tensor read any more; also while it waits for room."""
    for filled, nbytes in ((0, 64), (0, _LARGE), (8, _LARGE)):
        await _cancel_sends(near, far, filled, nbytes)


async def a_cancelled_receive_has_taken_nothing(near: KVPipe, far: KVPipe) -> None:
    """The next call returns that tensor."""
    for nbytes in _SIZES:
        await _cancel_receives(near, far, nbytes)


async def a_cancelled_receive_leaves_into_alone(near: KVPipe, far: KVPipe) -> None:
    """``into`` is the caller's again, and the tensor is still in the stream."""
    for nbytes in _SIZES:
        await _cancel_receives_into(near, far, nbytes)


async def a_cancelled_flush_leaves_no_trace(near: KVPipe, far: KVPipe) -> None:
    """What was sent arrives, and the next flush returns."""

    async def before() -> None:
        await near.send_tensor(_noise(_LARGE, 1))

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        await near.flush()
        _same(await far.recv_tensor(), _noise(_LARGE, 1))

    await sweep_cancellation(near.flush, check, before=before, modes=_MODES)


PIPE_CHECKS: Final[tuple[PipeCheck, ...]] = (
    a_tensor_comes_back_as_it_was_sent,
    any_shape_and_stride_can_be_sent,
    none_is_a_value,
    tensors_come_in_the_order_of_the_sends,
    a_tensor_may_be_overwritten_after_the_send,
    sending_waits_for_no_receive,
    a_full_pipe_makes_senders_wait_in_turn,
    a_tensor_above_the_bound_goes_alone,
    both_sides_may_send_before_either_receives,
    receivers_are_served_in_turn,
    a_tensor_lands_in_into,
    an_into_that_does_not_fit_is_refused,
    what_cannot_be_sent_is_refused,
    the_goodbye_comes_after_everything,
    a_closed_pipe_says_so,
    a_lost_peer_is_an_error,
    a_cancelled_send_has_sent_nothing,
    a_cancelled_receive_has_taken_nothing,
    a_cancelled_receive_leaves_into_alone,
    a_cancelled_flush_leaves_no_trace,
)


async def _cancel_sends(near: KVPipe, far: KVPipe, filled: int, nbytes: int) -> None:
    source = _noise(nbytes, 1)
    room: list[asyncio.Task[None]] = []

    async def before() -> None:
        source.copy_(_noise(nbytes, 1))
        await _send_many(near, filled)
        if filled:  # room comes while the send waits for it
            room.append(asyncio.create_task(_receive_many(far, filled)))

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        source.fill_(0)
        if room:
            await room.pop()
        await near.send_tensor(None)
        if not outcome.cancelled:
            _same(await far.recv_tensor(), _noise(nbytes, 1))
        _check(await far.recv_tensor() is None, "a cancelled send has sent something")
        await _send_many(near, 4)  # the whole bound is free again
        await near.flush()
        await _receive_many(far, 4)

    await sweep_cancellation(
        lambda: near.send_tensor(source), check, before=before, modes=_MODES
    )


async def _cancel_receives(near: KVPipe, far: KVPipe, nbytes: int) -> None:
    sends: list[asyncio.Task[None]] = []

    async def before() -> None:
        sends.append(asyncio.create_task(near.send_tensor(_noise(nbytes, 1))))

    async def check(
        k: int, mode: CancelMode, outcome: Outcome[torch.Tensor | None]
    ) -> None:
        found = await far.recv_tensor() if outcome.cancelled else outcome.value
        _same(found, _noise(nbytes, 1))
        await sends.pop()

    await sweep_cancellation(far.recv_tensor, check, before=before, modes=_MODES)


async def _cancel_receives_into(near: KVPipe, far: KVPipe, nbytes: int) -> None:
    into = torch.zeros(nbytes, dtype=torch.uint8)
    sends: list[asyncio.Task[None]] = []

    async def before() -> None:
        sends.append(asyncio.create_task(near.send_tensor(_noise(nbytes, 1))))

    async def check(
        k: int, mode: CancelMode, outcome: Outcome[torch.Tensor | None]
    ) -> None:
        found = into.clone()
        into.fill_(9)
        if outcome.cancelled:
            await far.recv_tensor(found)
        _same(found, _noise(nbytes, 1))
        _check(bool((into == 9).all()), "into was written to afterwards")
        await sends.pop()

    await sweep_cancellation(
        lambda: far.recv_tensor(into), check, before=before, modes=_MODES
    )


async def _send_many(pipe: KVPipe, count: int) -> None:
    for seed in range(count):
        await pipe.send_tensor(_noise(_LARGE, seed))


async def _receive_many(pipe: KVPipe, count: int) -> None:
    for seed in range(count):
        _same(await pipe.recv_tensor(), _noise(_LARGE, seed))


async def _expect(kind: type[Any], call: Awaitable[object]) -> Any:
    try:
        await call
    except kind as exc:
        return exc
    raise AssertionError(f"{kind.__name__} was expected, and nothing was raised")


def _noise(nbytes: int, seed: int) -> torch.Tensor:
    """``nbytes`` of uint8; no run of them is like another."""
    return _pattern(nbytes, seed).clone()


@functools.lru_cache(maxsize=64)
def _pattern(nbytes: int, seed: int) -> torch.Tensor:
    values = torch.arange(seed, seed + nbytes, dtype=torch.int64)
    return ((values * 2654435761) >> 13).to(torch.uint8)


def _same(found: torch.Tensor | None, expected: torch.Tensor) -> None:
    dense = expected.resolve_conj().resolve_neg().contiguous()
    if found is not None and (found.dtype, found.shape) == (dense.dtype, dense.shape):
        if numpy.array_equal(bytes_of(found), bytes_of(dense)):
            return
    what = "None" if found is None else f"{found.dtype} {tuple(found.shape)}"
    raise AssertionError(
        f"expected a {dense.dtype} {tuple(dense.shape)} with its bytes, found {what}"
    )


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
