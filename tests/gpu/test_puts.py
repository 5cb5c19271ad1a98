"""What another process puts into a buffer on its GPU, a real one. ``nox -s gpu``."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator
from typing import Final

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.testing.expectations import is_same, noise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("cupy") is None,
        reason='CuPy is not installed: pip install ".[cuda12]"',
    ),
]

_LARGE: Final = 64 * 2**20

_PRODUCER: Final = """
import asyncio, asynckv, sys
from asynckv.testing.expectations import noise
from harness.gpu_pairs import SharedPuts
from asynckv.types import TensorSpec
LARGE = 64 * 2**20
async def main():
    async with asynckv.connect(
        sys.argv[1], device="cuda:0", max_bytes="256MiB"
    ) as peer:
        await peer.lookup.insert([1], None, noise(LARGE, 1).cuda(), noise(9, 1), None)
        specs = {"key": TensorSpec((LARGE,), "uint8")}
        async with peer.lookup.open_insert([2], None, specs) as writer:
            await writer.put("key", noise(LARGE, 2).cuda())
        await peer.store.put("key", noise(LARGE, 3).cuda())
        print(peer.transport, SharedPuts(peer).has_shown, flush=True)
asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def producing(url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PRODUCER, url), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def test_what_another_process_puts_is_read_on_the_gpu() -> None:
    async with (
        asyncio.timeout(120),
        LookupBuffer("256MiB", device="cuda:0", drain_s=0) as lookup,
        StoreBuffer("256MiB") as store,
        serve("tcp://127.0.0.1:0", lookup=lookup, store=store) as server,
        producing(server.url) as process,
    ):
        assert process.stdout is not None
        assert await process.stdout.readline() == b"cuda_ipc True\n"
        for salt, tokens in enumerate(([1], [2]), 1):
            key = (await lookup.drop_select(tokens)).key
            assert isinstance(key, torch.Tensor)
            assert key.device == torch.device("cuda", 0)
            assert is_same(key, noise(_LARGE, salt))
            del key
        assert is_same(await store.get("key"), noise(_LARGE, 3))
