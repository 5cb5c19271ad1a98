"""Layers from another process of the same real GPU. ``nox -s gpu`` runs it."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator

import pytest
import torch

import asynckv
from asynckv.testing.expectations import is_same, noise
from harness.gpu_processes import BEGIN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        importlib.util.find_spec("cupy") is None,
        reason='CuPy is not installed: pip install ".[cuda12]"',
    ),
]

_NBYTES = 16 * 2**20
_LAYERS = 4
_WRITER = """
from asynckv.testing.expectations import noise
async def main():
    nbytes, layers = map(int, sys.argv[2:])
    async with (
        asynckv.LookupBuffer("256MiB", drain_s=0, device=open_device()) as lookup,
        asynckv.serve("tcp://127.0.0.1:0", lookup=lookup) as server,
    ):
        print(server.url, flush=True)
        spec = asynckv.TensorSpec((nbytes,), "uint8")
        specs = {f"{number}.key": spec for number in range(layers)}
        async with lookup.open_insert([1], None, specs, entry_id="it") as writer:
            for number, name in enumerate(specs):
                await asyncio.to_thread(sys.stdin.readline)
                await writer.put(name, noise(nbytes, number).cuda())
        await lookup.taken("it")
        await asyncio.to_thread(sys.stdin.readline)
        print(sum(lookup.statistics().mapped_by.values()), flush=True)
asyncio.run(main())
"""


@pytest.fixture
async def writer() -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that puts the next layer for each line that it reads."""
    pipe, sizes = asyncio.subprocess.PIPE, (str(_NBYTES), str(_LAYERS))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", BEGIN + _WRITER, "real", *sizes),
        stdin=pipe,
        stdout=pipe,
    )
    yield process
    if process.returncode is None:
        process.kill()
    await process.communicate()


async def _line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def test_layers_of_another_process_come_as_they_are_put(
    writer: asyncio.subprocess.Process,
) -> None:
    assert writer.stdin is not None
    async with asyncio.timeout(60):
        url = await _line(writer)
        async with asynckv.connect(url, device="cuda:0", max_bytes="256MiB") as peer:
            assert peer.transport == "cuda_ipc"
            writer.stdin.write(b"\n")
            into = {"1.key": torch.zeros(_NBYTES, dtype=torch.uint8, device="cuda:0")}
            async with peer.lookup.open_drop_select([1], into=into) as stream:
                for number in range(_LAYERS):
                    found = await stream.wait_for(f"{number}.key")
                    assert found.is_cuda and is_same(
                        found.cpu(), noise(_NBYTES, number)
                    )
                    writer.stdin.write(b"\n")
                assert await stream.wait_for("1.key") is into["1.key"]
            assert await _line(writer) == "0"  # nothing of it is kept
