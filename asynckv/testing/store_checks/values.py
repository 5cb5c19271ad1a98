"""What the checks share: a value that is large here, and what is left."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import torch

from asynckv.abc import KVStoreBuffer
from asynckv.buffers.store import StoreBuffer
from asynckv.testing.blocked import until
from asynckv.testing.expectations import noise

__all__ = ("DTYPES", "StoreCheck", "large", "until_only")

StoreCheck: TypeAlias = Callable[[KVStoreBuffer, StoreBuffer], Awaitable[None]]
"""Called with the client's side and the local buffer."""

DTYPES: Final = (
    torch.uint8,
    torch.int64,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.complex64,
)


def large(local: StoreBuffer) -> torch.Tensor:
    """More than rides with a frame, and little enough that eight of them fit."""
    return noise(max(2**17, local.statistics().max_bytes // 8), 0)


async def until_only(local: StoreBuffer, key: str) -> None:
    """Wait until nothing but the value of ``key`` is charged to the buffer.

    :raises TimeoutError: something else stays
    """
    value = await local.get(key)
    nbytes = 0 if value is None else value.nbytes
    await until(lambda: local.statistics().used_bytes == nbytes)
