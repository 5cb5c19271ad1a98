"""What a peer inserts from its GPU into a buffer on that one, or on another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, TypeAlias

from asynckv.testing.expectations import expect, is_same, only
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.types import TensorSpec
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import GpuPair, NcclBuffers, open_gpu_pair, open_nccl_buffers

__all__ = (
    "LAYERS",
    "PutPair",
    "PutWay",
    "check_is_in",
    "insert",
    "open_put_pair",
    "put_layers",
)

PutPair: TypeAlias = GpuPair | NcclBuffers

PutWay: TypeAlias = Literal["cuda_ipc", "nccl"]
"""Within one GPU, or between two."""

LAYERS: Final = {
    "key": TensorSpec((MIB,), "uint8"),
    "hidden": TensorSpec((8,), "uint8"),
}


async def insert(pair: PutPair, salt: int = 1, entry_id: str | None = None) -> None:
    """Insert a large tensor and a small one, both of the peer's GPU."""
    tensor = pair.theirs.tensor
    await pair.peer.lookup.insert(
        *([1], None, tensor(noise(MIB, salt)), None, tensor(noise(8))),
        entry_id=entry_id,
    )


async def put_layers(pair: PutPair) -> None:
    """Insert the same, layer by layer; the small one lies in host memory."""
    async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
        await writer.put("key", pair.theirs.tensor(noise(MIB, 1)))
        await writer.put("hidden", noise(8))


async def check_is_in(pair: PutPair, salt: int = 1) -> None:
    """The entry is there, once, on its GPU; and neither side keeps anything of it.

    :raises AssertionError: it is not so
    """
    entry = await pair.buffer.drop_select([1])
    key = only(entry.key)
    expect(key.is_cuda and is_same(key, noise(MIB, salt)), "another key")
    expect(is_same(entry.hidden, noise(8)), "another hidden")
    del entry, key
    await pair.emptied()


@asynccontextmanager
async def open_put_pair(
    gpus: FakeGpus, way: PutWay, **options: Any
) -> AsyncIterator[PutPair]:
    """Open a lookup buffer and a peer that puts that way, which is open.

    ``options`` are those of ``open_gpu_pair``.
    """
    if way == "cuda_ipc":
        async with open_gpu_pair(gpus, **options) as pair:
            yield pair
    else:
        async with open_nccl_buffers(gpus, **options) as buffers:
            await buffers.opened()
            yield buffers
