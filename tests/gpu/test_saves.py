"""Blocks that another process saves from a real GPU. ``nox -s gpu`` runs it."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from asyncio.subprocess import PIPE
from typing import Final

import pytest
import torch

from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.requests import StoreMetadata, StoreRequest
from asynckv.connectors.store.worker import StoreWorker
from asynckv.testing.blocked import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        importlib.util.find_spec("cupy") is None,
        reason='CuPy is not installed: pip install ".[cuda12]"',
    ),
]

_LAYERS: Final = 12
_BLOCKS: Final = 256
_CHUNK_BLOCKS: Final = 16
"""Of 16 tokens, as it is where nobody says otherwise."""
_SHAPE: Final = (_BLOCKS, 2, 16, 8, 128)

_SAVER: Final = """
import asyncio, sys, torch
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.requests import StoreMetadata, StoreRequest
from asynckv.connectors.store.worker import StoreWorker
url, layers = sys.argv[1], int(sys.argv[2])
shape = tuple(map(int, sys.argv[3].split(",")))
async def main():
    config = KVTransferConfig(
        kv_connector="StoreConnector", kv_role="kv_producer",
        kv_connector_extra_config={"store": url, "fingerprint": "toy"},
    )
    caches = {
        f"layer.{n}": torch.full(shape, n + 1, dtype=torch.bfloat16, device="cuda")
        for n in range(layers)
    }
    async with StoreWorker(config, KVEngine(engine_id="S", block_size=16)) as worker:
        worker.register_kv_caches(caches)
        await worker.start()
        for name in ("first", "second"):
            keys = tuple(f"{name}.{n}" for n in range(shape[0] // 16))
            order = StoreRequest(name, keys, (tuple(range(shape[0])),))
            worker.bind_connector_metadata(StoreMetadata(saves=(order,)))
            await worker.wait_for_save()
            worker.clear_connector_metadata()
            await worker.flush()
        print(worker.statistics().saved_blocks, flush=True)
        sys.stdin.read()
asyncio.run(main())
"""


def loader(url: str) -> tuple[StoreWorker, dict[str, torch.Tensor]]:
    config = KVTransferConfig(
        kv_connector="StoreConnector",
        kv_role="kv_consumer",
        kv_connector_extra_config={"store": url, "fingerprint": "toy"},
    )
    worker = StoreWorker(config, KVEngine(engine_id="L", block_size=16))
    caches = {
        f"layer.{number}": torch.zeros(_SHAPE, dtype=torch.bfloat16, device="cuda")
        for number in range(_LAYERS)
    }
    worker.register_kv_caches(caches)
    return worker, caches


async def load(worker: StoreWorker, name: str, first: int = 0) -> None:
    """Load a prompt's blocks from ``first`` on; they lie in the reverse order."""
    keys = tuple(f"{name}.{number}" for number in range(_BLOCKS // _CHUNK_BLOCKS))
    blocks = tuple(reversed(range(_BLOCKS - first)))
    order = StoreRequest(name, keys, (blocks,), first)
    worker.bind_connector_metadata(StoreMetadata(loads=(order,)))
    await worker.start_load_kv()
    await until(lambda: not worker.statistics().loading, timeout_s=60)
    worker.clear_connector_metadata()
    assert worker.get_finished().reasons == {}


async def test_blocks_of_a_gpu_are_saved_and_loaded_by_way_of_the_host() -> None:
    shape = ",".join(map(str, _SHAPE))
    async with (
        asyncio.timeout(180),
        StoreBuffer("1GiB", fingerprint="toy") as store,
        serve("tcp://127.0.0.1:0", store=store) as server,
    ):
        args = (sys.executable, "-c", _SAVER, server.url, str(_LAYERS), shape)
        process = await asyncio.create_subprocess_exec(*args, stdin=PIPE, stdout=PIPE)
        try:
            assert process.stdout is not None
            said = await process.stdout.readline()
            assert int(said) == 2 * _BLOCKS
            worker, caches = loader(server.url)
            async with worker:
                await worker.start()
                for name, begin in (("first", 0), ("second", 0), ("first", 5)):
                    await load(worker, name, begin)
                    for number, cache in enumerate(caches.values(), 1):
                        assert bool((cache[: _BLOCKS - begin] == number).all())
                        assert not cache[_BLOCKS - begin :].any()
                        cache.zero_()
        finally:
            await process.communicate(b"")
