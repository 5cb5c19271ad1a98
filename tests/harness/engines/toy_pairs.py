"""Two toy engines and what connects them."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Mapping

from asynckv.abc import KVConnectorWorker
from asynckv.config import KVLoadFailurePolicy, KVRole, KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.registry import find_connector, make_scheduler, make_worker
from asynckv.connectors.store.worker import StoreWorker
from asynckv.parallel.shapes import EngineShape, KVLayout
from harness.engines.toy_engine import ToyEngine
from harness.engines.toy_model import ToyModel
from harness.engines.toy_rank import ToyRank
from harness.fake_devices import FakeDevice, lanes_of

__all__ = ("free_urls", "make_engine", "pair_configs", "toy_shape")


def toy_shape(
    model: ToyModel,
    *,
    tp_size: int = 1,
    block_size: int = 16,
    layout: KVLayout | None = None,
) -> EngineShape:
    """Return how a toy engine's KV is cut."""
    return EngineShape(
        layout=layout or KVLayout.kv_first(),
        block_size=block_size,
        key_nbytes=4 * model.head_dim,
        num_kv_heads=model.heads,
        tp_size=tp_size,
        stages=(model.layers,),
    )


def make_engine(
    name: str,
    config: KVTransferConfig,
    shape: EngineShape,
    model: ToyModel,
    *,
    num_blocks: int = 64,
    chunk: int = 64,
    policy: KVLoadFailurePolicy = "recompute",
    gpu: FakeDevice | None = None,
) -> ToyEngine:
    """Return an engine with the configured connector. Enter it, once.

    Its caches are on ``gpu``, if there is one; not with a ``MultiConnector``.
    """
    places = [
        KVEngine(
            engine_id=name,
            block_size=shape.block_size,
            rank=rank,
            tp_size=shape.tp_size,
            shape=shape,
        )
        for rank in range(shape.tp_size)
    ]
    return ToyEngine(
        [ToyRank(model, shape, rank, num_blocks, gpu) for rank in range(shape.tp_size)],
        make_scheduler(config, places[0]),
        [_worker(config, place, gpu) for place in places],
        num_blocks=num_blocks,
        chunk=chunk,
        policy=policy,
    )


def _worker(
    config: KVTransferConfig, place: KVEngine, gpu: FakeDevice | None
) -> KVConnectorWorker:
    if gpu is None:
        return make_worker(config, place)
    lanes = lanes_of(gpu)
    if find_connector(config).name == "StoreConnector":
        return StoreWorker(config, place, lanes=lanes)
    return P2PWorker(config, place, lanes=lanes, device=gpu.device)


def pair_configs(
    prefill: list[str],
    decode: list[str],
    extra: Mapping[str, object] | None = None,
    *,
    roles: tuple[KVRole, KVRole] = ("kv_producer", "kv_consumer"),
    buffer_device: str = "cpu",
) -> tuple[KVTransferConfig, KVTransferConfig]:
    """Return the configurations of P and D, given the URL of each of their ranks."""
    more = dict(extra or {})
    return (
        KVTransferConfig(
            kv_connector="P2PConnector",
            kv_buffer_size="16MiB",
            kv_buffer_device=buffer_device,
            kv_role=roles[0],
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "listen": prefill[0],
                "peers": {"D": decode},
                "consumer_tp_size": len(decode),
                **more,
            },
        ),
        KVTransferConfig(
            kv_connector="P2PConnector",
            kv_buffer_size="16MiB",
            kv_buffer_device=buffer_device,
            kv_role=roles[1],
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "listen": decode[0],
                "peers": {"P": prefill},
                "consumer_tp_size": len(decode),
                **more,
            },
        ),
    )


def free_urls(count: int) -> list[str]:
    """Return the URLs of so many ports that follow each other, and are free now.

    They lie below those that the system gives to connections: it takes none of them.
    """
    while True:
        base = random.randrange(15_000, 32_000)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(base, base + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return [f"tcp://127.0.0.1:{base + n}" for n in range(count)]
