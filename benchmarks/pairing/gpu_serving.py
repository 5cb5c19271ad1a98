"""The other process of ``benchmarks.devices``: entries of the same GPU.

It prints two URLs: of a buffer on the GPU, in which one entry waits, and of one in host
memory, into which parts of a tensor of the GPU are copied as fast as they are taken. It
ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Final

import torch

import asynckv
from asynckv.cli.bench.server import until_hung_up
from asynckv.cli.process import run
from asynckv.devices.names import Device
from asynckv.devices.opening import OpenDevice, open_device
from asynckv.types import TensorSpec

__all__ = ("TOKENS", "content_of", "main", "serve_gpu")

_PARTS_AHEAD: Final = 4
"""So many parts wait in host memory, so that copies to it and from it overlap."""
TOKENS: Final = (1,)
_SPARE_BYTES: Final = 2**20
_GIVEN_BACK: Final = 1000
"""As often the bench gives an entry back at most."""


def content_of(nbytes: int) -> torch.Tensor:
    """Return what an entry of so many bytes holds."""
    return torch.arange(nbytes, dtype=torch.int32).to(torch.uint8)


async def serve_gpu(device: Device, nbytes: int, parts: int) -> None:
    """Serve entries of ``nbytes``, and of a part of that, until stdin ends.

    :raises GPUUnavailable: CuPy, torch with CUDA, a driver or the GPU is missing
    """
    opened = await open_device(device)
    if opened is None:
        raise TypeError("no GPU was named")
    part_nbytes = nbytes // parts
    async with (
        asynckv.LookupBuffer(
            nbytes + _SPARE_BYTES, device=device, max_deliver=_GIVEN_BACK
        ) as whole,
        asynckv.LookupBuffer(_PARTS_AHEAD * part_nbytes + _SPARE_BYTES) as layered,
        asynckv.serve("tcp://127.0.0.1:0", lookup=whole) as one,
        asynckv.serve("tcp://127.0.0.1:0", lookup=layered) as other,
        asyncio.TaskGroup() as tasks,
    ):
        layered.pool.lanes = opened.make_pool().lanes  # of this GPU, as opened
        filling = [
            tasks.create_task(_keep_filled(buffer, await _content(opened, size)))
            for buffer, size in ((whole, nbytes), (layered, part_nbytes))
        ]
        print(one.url, other.url, flush=True)
        await until_hung_up()
        for task in filling:
            task.cancel()


async def _content(opened: OpenDevice, nbytes: int) -> torch.Tensor:
    """Return a tensor of the GPU with something in each byte."""
    there = opened.device.empty(TensorSpec((nbytes,), "uint8"))
    pool = opened.make_pool()
    try:
        await pool.copy([content_of(nbytes)], [there])
    finally:
        pool.close()
    return there


async def _keep_filled(buffer: asynckv.LookupBuffer, tensor: torch.Tensor) -> None:
    while True:
        await buffer.insert(TOKENS, None, tensor, None, None)


def main(arguments: Sequence[str]) -> None:
    """Serve the GPU with the number, the bytes and the parts of ``arguments``."""
    number, nbytes, parts = (int(argument) for argument in arguments)
    run(serve_gpu(Device(number), nbytes, parts))


if __name__ == "__main__":
    main(sys.argv[1:])
