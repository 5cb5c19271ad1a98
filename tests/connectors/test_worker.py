from __future__ import annotations

import asyncio

import pytest
import torch

from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.store.worker import StoreWorker
from asynckv.connectors.worker import CacheWorker
from asynckv.errors import ConfigError, WrongLoop

ENGINE = KVEngine(engine_id="E", block_size=16)
KINDS = pytest.mark.parametrize("kind", [P2PWorker, StoreWorker])


def config_of(device: str, **extra: object) -> KVTransferConfig:
    extra = {"store": "mem://s", "fingerprint": "toy", **extra}
    return KVTransferConfig(
        kv_role="kv_both", kv_buffer_device=device, kv_connector_extra_config=extra
    )


@KINDS
async def test_without_caches_nothing_can_be_moved(kind: type[CacheWorker]) -> None:
    worker = kind(config_of("cpu"), ENGINE)
    assert worker.mark_stream() is None
    worker.follow(None)
    with pytest.raises(RuntimeError, match="register_kv_caches"):
        worker._registered()
    worker.abort()


@KINDS
async def test_caches_of_all_layers_may_be_one_tensor(kind: type[CacheWorker]) -> None:
    worker = kind(config_of("cpu"), ENGINE)
    worker.register_cross_layers_kv_cache(torch.zeros(2, 4, 16, 2), ["a", "b"])
    assert worker._registered().caches.layers == ("a", "b")
    worker.follow(worker.mark_stream())
    assert worker._registered().now() is None
    worker.abort()


@KINDS
def test_caches_that_are_elsewhere_are_refused(kind: type[CacheWorker]) -> None:
    worker = kind(config_of("cuda:1"), ENGINE)
    with pytest.raises(ConfigError, match="cuda:1, and the caches are on cpu"):
        worker.register_kv_caches({"a": torch.zeros(4, 16, 2)})


@KINDS
def test_a_worker_belongs_to_the_loop_on_which_it_was_used(
    kind: type[CacheWorker],
) -> None:
    worker, caches = kind(config_of("cpu"), ENGINE), {"a": torch.zeros(4, 16, 2)}

    async def use() -> None:
        worker.get_finished()

    async def misuse() -> None:
        with pytest.raises(WrongLoop):
            worker.register_kv_caches(caches)
        with pytest.raises(WrongLoop):
            worker.register_cross_layers_kv_cache(torch.zeros(1, 4, 16, 2), ["a"])
        with pytest.raises(WrongLoop):
            worker.follow(None)
        with pytest.raises(WrongLoop):
            await worker.aclose()

    asyncio.run(use())
    asyncio.run(misuse())
    worker.abort()
