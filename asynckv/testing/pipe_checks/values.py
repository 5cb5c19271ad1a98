"""What the checks share: sizes, and many tensors at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from asynckv.abc import KVPipe
from asynckv.testing.expectations import expect_same, noise

__all__ = ("LARGE", "PIPE_BYTES", "SIZES", "PipeCheck", "receive_many", "send_many")

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
