"""A connector's worker with caches on a GPU, real or not: here, and in a process.

``python -m harness.gpu_workers KIND URL`` saves :data:`PROMPT`, says so, and
serves until its standard input ends. With ``push`` behind it pushes to the URL, twice,
and says by which way the second one went, and how many layers came to the host; with
``half`` it pushes the first layer alone of another one.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final

import torch

from asynckv.config import KVRole, KVTransferConfig
from asynckv.connectors.engine import KVEngine, prompt_digest
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.requests import LoadRequest, P2PMetadata, SaveRequest
from asynckv.testing.blocked import until
from harness.fake_devices import fake_device_of, lanes_of
from harness.fake_gpus import FakeGpus
from harness.gpu_processes import GpuKind

__all__ = (
    "LOADED",
    "PROMPT",
    "SAVED",
    "content_of",
    "load_request",
    "save_request",
    "worker_on",
)

PROMPT: Final = tuple(range(64))
SAVED: Final = (5, 1, 2, 7)
"""The blocks of the prompt where it is saved, 16 tokens each."""
LOADED: Final = (0, 6, 3, 4)
"""And where it is loaded."""

_LAYERS: Final = ("a", "b")
_SHAPE: Final = (9, 16, 8, 128)


def content_of(layer: str) -> torch.Tensor:
    """Return what a layer's cache holds where the prompt is saved."""
    start = 1000 * _LAYERS.index(layer)
    count = torch.Size(_SHAPE).numel()
    return (torch.arange(start, start + count) % 9973).float().view(_SHAPE)


def worker_on(
    kind: GpuKind,
    role: KVRole,
    url: str,
    *,
    gpus: FakeGpus | None = None,
    **extra: object,
) -> tuple[P2PWorker, dict[str, torch.Tensor]]:
    """Return a worker for each side, between which there is ``url``, and its caches.

    ``gpus`` are those of a fake one, if not its own. ``extra`` are options of
    connectors. Without a ``direction`` the consumer pulls.
    """
    producer = role == "kv_producer"
    serves = producer == (extra.get("direction", "pull") == "pull")
    peer = "D" if producer else "P"
    config = KVTransferConfig(
        kv_connector="P2PConnector",
        kv_role=role,
        kv_buffer_size="16MiB",
        kv_buffer_device="cuda:0",
        kv_connector_extra_config={
            "direction": "pull",
            "load_timeout_s": 20.0,
            **extra,
            **({"listen": url} if serves else {"peers": {peer: url}}),
        },
    )
    engine = KVEngine(engine_id="P" if producer else "D", block_size=16)
    content = {
        layer: content_of(layer) if producer else torch.zeros(_SHAPE)
        for layer in _LAYERS
    }
    if kind == "real":
        worker = P2PWorker(config, engine)
        caches = {layer: one.cuda() for layer, one in content.items()}
    else:
        gpu = fake_device_of((gpus or FakeGpus()).process())
        lanes, device = lanes_of(gpu), gpu.device
        worker = P2PWorker(config, engine, lanes=lanes, device=device)
        caches = {layer: gpu.tensor(one) for layer, one in content.items()}
    worker.register_kv_caches(caches)
    return worker, caches


def load_request(name: str) -> LoadRequest:
    """Order what was saved as ``name``."""
    digest, count = prompt_digest(PROMPT, len(PROMPT)), len(PROMPT)
    return LoadRequest(name, name, "P", (LOADED,), num_tokens=count, digest=digest)


def save_request(name: str) -> SaveRequest:
    """Order to save the prompt as ``name``."""
    return SaveRequest(name, name, "D", PROMPT, (SAVED,))


async def _save(worker: P2PWorker, name: str) -> str:
    worker.bind_connector_metadata(P2PMetadata(saves=(save_request(name),)))
    await worker.wait_for_save()
    await until(lambda: not worker.statistics().saving)
    worker.clear_connector_metadata()
    failed = worker.get_finished().failed_sending
    return f"failed {failed}" if failed else "saved"


async def _push(worker: P2PWorker, *, half: bool) -> str:
    """Save once to have dialled, then once more."""
    if (said := await _save(worker, "first")) != "saved":
        return said
    (line,) = worker.routes.peers._lines.values()
    before = worker.statistics().staged_saves
    if half:
        worker.bind_connector_metadata(P2PMetadata(saves=(save_request("t"),)))
        worker.save_kv_layer(_LAYERS[0])
        return "begun"
    said = await _save(worker, "t")
    layers = worker.statistics().staged_saves - before
    return f"{said} {(await line.peer()).transport} {layers}"


async def _run(kind: GpuKind, url: str, how: str) -> None:
    direction = "push" if how else "pull"
    worker, _ = worker_on(kind, "kv_producer", url, direction=direction)
    async with worker:
        await worker.start()
        saving = _push(worker, half=how == "half") if how else _save(worker, "t")
        sys.stdout.write(f"{await saving}\n")
        sys.stdout.flush()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(lambda: protocol, sys.stdin)
        await reader.read()
        pipe.close()


if __name__ == "__main__":
    _kind: GpuKind = "real" if sys.argv[1] == "real" else "fake"
    asyncio.run(_run(_kind, sys.argv[2], "".join(sys.argv[3:])))
