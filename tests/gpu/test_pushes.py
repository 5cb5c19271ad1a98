"""Layers that another process pushes from the same real GPU. ``nox -s gpu`` runs it."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from asyncio.subprocess import PIPE
from typing import Final

import pytest
import torch

from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine, prompt_digest
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.requests import LoadRequest, P2PMetadata
from asynckv.testing.blocked import until
from harness.engines.toy_pairs import free_urls

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
_SHAPE: Final = (_BLOCKS, 2, 16, 8, 128)
_LAYER_NBYTES: Final = 2 * torch.Size(_SHAPE).numel()

_PRODUCER: Final = """
import asyncio, sys, torch
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.requests import P2PMetadata, SaveRequest
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.testing.blocked import until
url, layers, room = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
shape = tuple(map(int, sys.argv[4].split(",")))
async def main():
    config = KVTransferConfig(
        kv_connector="P2PConnector", kv_role="kv_producer", kv_buffer_device="cuda:0",
        kv_buffer_size="1GiB",
        kv_connector_extra_config={"peers": {"D": url}, "push_buffer_size": room},
    )
    engine = KVEngine(engine_id="P", block_size=16, holds_saved_blocks=True)
    caches = {
        f"layer.{n}": torch.full(shape, n + 1, dtype=torch.bfloat16, device="cuda")
        for n in range(layers)
    }
    tokens, ids = tuple(range(16 * shape[0])), (tuple(range(shape[0])),)
    async with P2PWorker(config, engine) as worker:
        worker.register_kv_caches(caches)
        await worker.start()
        for name in ("first", "t"):
            before = worker.statistics().staged_saves
            order = SaveRequest(name, name, "D", tokens, ids)
            worker.bind_connector_metadata(P2PMetadata(saves=(order,)))
            await worker.wait_for_save()
            await until(lambda: not worker.statistics().saving, timeout_s=60)
            worker.clear_connector_metadata()
        (line,) = worker.routes.peers._lines.values()
        peer = await line.peer()
        print(peer.transport, worker.statistics().staged_saves - before,
              peer.on_gpu.arena.pages.nbytes, flush=True)
        sys.stdin.read()
asyncio.run(main())
"""


def consumer(url: str) -> tuple[P2PWorker, dict[str, torch.Tensor]]:
    config = KVTransferConfig(
        kv_connector="P2PConnector",
        kv_role="kv_consumer",
        kv_buffer_device="cuda:0",
        kv_buffer_size="1GiB",
        kv_connector_extra_config={"listen": url, "direction": "push"},
    )
    worker = P2PWorker(config, KVEngine(engine_id="D", block_size=16))
    caches = {
        f"layer.{number}": torch.zeros(_SHAPE, dtype=torch.bfloat16, device="cuda")
        for number in range(_LAYERS)
    }
    worker.register_kv_caches(caches)
    return worker, caches


async def load(worker: P2PWorker, name: str) -> None:
    tokens = tuple(range(16 * _BLOCKS))
    order = LoadRequest(
        *(name, name, "P", (tuple(reversed(range(_BLOCKS))),)),
        num_tokens=len(tokens),
        digest=prompt_digest(tokens, len(tokens)),
    )
    worker.bind_connector_metadata(P2PMetadata(loads=(order,)))
    await worker.start_load_kv()
    await until(lambda: not worker.statistics().loading, timeout_s=60)
    worker.clear_connector_metadata()
    assert worker.get_finished().reasons == {}


async def test_layers_follow_each_other_through_little_memory_of_the_gpu() -> None:
    (url,) = free_urls(1)
    worker, caches = consumer(url)
    room, shape = 2 * _LAYER_NBYTES, ",".join(map(str, _SHAPE))
    args = (sys.executable, "-c", _PRODUCER, url, str(_LAYERS), str(room), shape)
    async with asyncio.timeout(180), worker:
        await worker.start()
        process = await asyncio.create_subprocess_exec(*args, stdin=PIPE, stdout=PIPE)
        try:
            assert process.stdout is not None
            said = await process.stdout.readline()
            assert said.decode().split() == ["cuda_ipc", "0", str(room)]
            for name in ("first", "t"):
                await load(worker, name)
                for number, cache in enumerate(caches.values(), 1):
                    assert bool((cache == number).all())
                    cache.zero_()
        finally:
            await process.communicate(b"")
