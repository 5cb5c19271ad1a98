"""What an engine's step calls returns at once, whatever its size and its peers do."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine, namespace_of
from asynckv.connectors.multi import MultiMetadata, MultiWorker
from asynckv.connectors.options import Direction
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.requests import (
    LoadRequest,
    P2PMetadata,
    SaveRequest,
    StoreMetadata,
    StoreRequest,
)
from asynckv.connectors.store.worker import StoreWorker
from asynckv.integrations.bridge.bridge import Bridge
from asynckv.tensors import copying
from asynckv.testing.blocked import until
from harness.cancellations.connectors.grounds import (
    LARGE,
    SMALL,
    open_p2p,
    until_saved,
)
from harness.engines.toy_model import ToyModel

HUGE = ToyModel(layers=2, head_dim=2**11)
"""Its layers are copied in several pieces."""

HEADER_NBYTES = 512
MODELS = pytest.mark.parametrize("model", [SMALL, LARGE, HUGE], ids=lambda m: "")
DIRECTIONS = pytest.mark.parametrize("direction", ["pull", "push"])


class Copies:
    """Every copy of a pool, and the thread that does it; ``gate`` stops the threads.

    ``threads`` are those that copied anything of a layer: a header is smaller.
    """

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, call: Any, indices: range) -> None:
        if threading.get_ident() != self.loop_thread:
            self.gate.wait(20)
        if any(call._sources[index].nbytes > HEADER_NBYTES for index in indices):
            self.threads.append(threading.get_ident())
        self.run(call, indices)

    loop_thread = 0
    run = staticmethod(copying._Call.run)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    copies = Copies()
    copies.loop_thread = threading.get_ident()
    monkeypatch.setattr(
        copying._Call, "run", lambda call, indices: copies(call, indices)
    )
    yield copies
    copies.gate.set()


def finishes_at_once(coroutine: Any) -> bool:
    """Run it to its end in one step; ``False`` if it waits for anything."""
    try:
        coroutine.send(None)
    except StopIteration:
        return True
    coroutine.close()
    return False


@MODELS
@DIRECTIONS
async def test_a_layer_is_not_copied_before_save_kv_layer_returns(
    direction: Direction, model: ToyModel, copies: Copies
) -> None:
    async with open_p2p("tcp", direction, model=model) as ground:
        copies.threads.clear()
        name = ground.new_name()
        ground.begin_save(name)  # save_kv_layer of each layer; nobody waited
        assert copies.threads == []
        await ground.end_save(name)
        await ground.load(name)
        if model is not SMALL:
            assert copies.threads and copies.loop_thread not in copies.threads


async def test_what_is_not_copied_yet_was_not_read_by_save_kv_layer(
    copies: Copies,
) -> None:
    async with open_p2p("mem", model=LARGE) as ground:
        caches, worker = ground.prefill.caches[0], ground.prefill.workers[0]
        copies.gate.clear()
        caches.spoil()
        name = ground.new_name()
        order = P2PMetadata(saves=(ground.save_request(name),))
        worker.bind_connector_metadata(order)
        for layer in ground.model.layer_names:
            worker.save_kv_layer(layer)
        caches.compute()  # had it been read, what was there before would go over
        copies.gate.set()
        await ground.end_save(name)
        await ground.load(name)


@MODELS
@DIRECTIONS
async def test_blocks_may_be_overwritten_after_wait_for_save(
    direction: Direction, model: ToyModel
) -> None:
    async with open_p2p("unix", direction, model=model) as ground:
        name = ground.new_name()
        ground.begin_save(name)
        await ground.prefill.workers[0].wait_for_save()
        ground.prefill.caches[0].spoil()
        await until_saved(ground.prefill.workers[0])
        ground.prefill.workers[0].get_finished()
        ground.prefill.clear()
        await ground.load(name)  # looks at every byte


def worker_and_caches(
    config: KVTransferConfig, blocks: int
) -> tuple[P2PWorker, dict[str, torch.Tensor]]:
    caches = {"layer": torch.ones(blocks, 2**18)}
    worker = P2PWorker(config, KVEngine(engine_id="P", block_size=16))
    worker.register_kv_caches(caches)
    return worker, caches


@pytest.mark.parametrize("blocks", [1, 16])
def test_no_size_is_copied_in_the_thread_that_calls(
    blocks: int, copies: Copies
) -> None:
    copies.loop_thread = 0
    bridge = Bridge[None]("engine")
    config = KVTransferConfig(
        kv_role="kv_producer",
        kv_connector_extra_config={"direction": "pull", "listen": "mem://at-once"},
    )
    worker, caches = worker_and_caches(config, blocks)
    tokens = tuple(range(16 * blocks))
    order = SaveRequest("r", "t", "", tokens, (tuple(range(blocks)),))
    try:
        bridge.run(worker.start, timeout_s=10)
        bridge.call(worker.bind_connector_metadata, P2PMetadata(saves=(order,)))
        bridge.call(worker.save_kv_layer, "layer", caches["layer"])
        bridge.run(worker.wait_for_save, timeout_s=10)
        assert copies.threads and threading.get_ident() not in copies.threads
        bridge.run(worker.aclose, timeout_s=10)
    finally:
        bridge.shutdown()


def loads_from(url: str) -> tuple[P2PWorker, P2PMetadata]:
    config = KVTransferConfig(
        kv_role="kv_consumer",
        kv_connector_extra_config={"direction": "pull", "peers": {"P": url}},
    )
    worker, _ = worker_and_caches(config, 2)
    return worker, P2PMetadata(loads=(LoadRequest("r", "t", "P", ((1,),), 0, 3),))


@contextlib.contextmanager
def frozen() -> Iterator[str]:
    """One that is connected to, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"


async def test_start_load_kv_does_not_wait_for_a_peer_that_is_frozen() -> None:
    with frozen() as url:
        worker, orders = loads_from(url)
        async with worker:
            worker.bind_connector_metadata(orders)
            assert finishes_at_once(worker.start_load_kv())
            assert worker.statistics().loading == 1
        assert worker.get_finished().invalid_block_ids == {1}


async def test_start_load_kv_does_not_wait_for_a_peer_that_is_dead() -> None:
    with frozen() as url:
        pass  # and now nobody listens there
    worker, orders = loads_from(url)
    async with worker:
        worker.bind_connector_metadata(orders)
        assert finishes_at_once(worker.start_load_kv())
        await until(lambda: not worker.statistics().loading)
        results = worker.get_finished()
        assert results.failed_recving == {"r"}
        assert results.invalid_block_ids == {1}
        assert results.reasons["r"].startswith("PeerLost")


@DIRECTIONS
async def test_start_load_kv_does_not_wait_for_a_peer_that_is_slow(
    direction: Direction,
) -> None:
    async with open_p2p("mem", direction) as ground:
        name = ground.new_name()
        worker = ground.decode.workers[0]
        order = ground.load_request(name)
        worker.bind_connector_metadata(P2PMetadata(loads=(order,)))
        assert finishes_at_once(worker.start_load_kv())
        assert worker.statistics().loading == 1
        await ground.save(name)
        await ground.end_load(order)


async def test_start_load_kv_of_several_does_not_wait_for_their_peers() -> None:
    with frozen() as url:
        worker, orders = loads_from(url)
        config = KVTransferConfig(
            kv_role="kv_both",
            kv_connector_extra_config={
                "store": url,
                "fingerprint": "toy",
                "chunk_tokens": 16,
            },
        )
        other = StoreWorker(config, KVEngine(engine_id="P", block_size=16))
        other.register_kv_caches({"layer": torch.zeros(2, 64)})
        blocks = StoreMetadata(loads=(StoreRequest("s", ("key",), ((0,),)),))
        async with MultiWorker([worker, other]) as several:
            parts = tuple(map(msgspec.msgpack.encode, (orders, blocks)))
            several.bind_connector_metadata(MultiMetadata(parts))
            assert finishes_at_once(several.start_load_kv())
            assert other.statistics().loading == 1
        assert several.get_finished().failed_recving == {"r", "s"}


async def test_a_store_reads_blocks_in_wait_for_save_alone(copies: Copies) -> None:
    store = StoreBuffer("64MiB")
    config = KVTransferConfig(kv_connector_extra_config={"chunk_tokens": 16})
    worker = StoreWorker(config, KVEngine(engine_id="E", block_size=16), store)
    cache = torch.ones(4, 2**18)
    worker.register_kv_caches({"layer": cache})
    orders = StoreMetadata(saves=(StoreRequest("r", ("a", "b"), ((3, 0),)),))
    async with store, worker:
        worker.bind_connector_metadata(orders)
        worker.save_kv_layer("layer", cache)
        assert copies.threads == []
        await worker.wait_for_save()
        cache.zero_()
        await worker.flush()
        assert copies.loop_thread not in copies.threads
        value = await store.get(f"a/{namespace_of(worker.engine)}/0")
        assert value is not None and bool((value[64:].view(torch.float32) == 1).all())
