"""What can be sent, and that it comes back as it was."""

from __future__ import annotations

from typing import Final

import torch

from asynckv.abc import KVPipe
from asynckv.tensors.views import dtype_of
from asynckv.testing.expectations import expect, expect_error, expect_same, noise
from asynckv.testing.pipe_checks.values import LARGE, SIZES, PipeCheck
from asynckv.types import DTYPE_NBYTES

__all__ = (
    "TENSOR_CHECKS",
    "a_tensor_comes_back_as_it_was_sent",
    "a_tensor_lands_in_into",
    "a_tensor_may_be_overwritten_after_the_send",
    "an_into_that_does_not_fit_is_refused",
    "any_shape_and_stride_can_be_sent",
    "none_is_a_value",
    "what_cannot_be_sent_is_refused",
)


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
