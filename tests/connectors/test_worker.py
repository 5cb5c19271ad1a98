"""Connectors belong to who first used them: elsewhere they raise, and do nothing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
import pytest
import torch

from asynckv.abc import (
    KVAnswer,
    KVConnectorMetadata,
    KVConnectorScheduler,
    KVConnectorStep,
    KVConnectorWorker,
    KVQuestion,
    KVRequest,
    KVTransferResults,
)
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.multi import MultiMetadata, MultiWorker
from asynckv.connectors.p2p.scheduler import P2PScheduler
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.registry import make_scheduler, make_worker
from asynckv.connectors.requests import P2PMetadata, StoreMetadata
from asynckv.connectors.store.scheduler import StoreScheduler
from asynckv.connectors.store.worker import StoreWorker
from asynckv.connectors.worker import CacheWorker
from asynckv.errors import ConfigError, WrongLoop
from asynckv.integrations.bridge import Bridge

ENGINE = KVEngine(engine_id="E", block_size=16)
KINDS = pytest.mark.parametrize("kind", [P2PWorker, StoreWorker])


def config_on(device: str, **extra: object) -> KVTransferConfig:
    extra = {"store": "mem://s", "fingerprint": "toy", **extra}
    return KVTransferConfig(
        kv_role="kv_both", kv_buffer_device=device, kv_connector_extra_config=extra
    )


@KINDS
async def test_without_caches_nothing_can_be_moved(kind: type[CacheWorker]) -> None:
    worker = kind(config_on("cpu"), ENGINE)
    assert worker.mark_stream() is None
    worker.follow(None)
    with pytest.raises(RuntimeError, match="register_kv_caches"):
        worker._registered()
    worker.abort()


@KINDS
async def test_caches_of_all_layers_may_be_one_tensor(kind: type[CacheWorker]) -> None:
    worker = kind(config_on("cpu"), ENGINE)
    worker.register_cross_layers_kv_cache(torch.zeros(2, 4, 16, 2), ["a", "b"])
    assert worker._registered().caches.layers == ("a", "b")
    worker.follow(worker.mark_stream())
    assert worker._registered().now() is None
    worker.abort()


@KINDS
def test_caches_that_are_elsewhere_are_refused(kind: type[CacheWorker]) -> None:
    worker = kind(config_on("cuda:1"), ENGINE)
    with pytest.raises(ConfigError, match="cuda:1, and the caches are on cpu"):
        worker.register_kv_caches({"a": torch.zeros(4, 16, 2)})


REQUEST = KVRequest("r", tuple(range(20)))
NAMES = ("P2PConnector", "StoreConnector", "MultiConnector")
STORE = {"store": "mem://no-such-store", "fingerprint": "toy", "chunk_tokens": 16}
P2P = {"peers": {"P": "mem://nobody"}, "listen": "mem://wrong-loops"}


def config_of(name: str) -> KVTransferConfig:
    children = [
        {"kv_connector": "P2PConnector", "kv_connector_extra_config": P2P},
        {"kv_connector": "StoreConnector", "kv_connector_extra_config": STORE},
    ]
    extra: dict[str, dict[str, object]] = {
        "P2PConnector": {**P2P},
        "StoreConnector": {**STORE},
        "MultiConnector": {"connectors": children},
    }
    return KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra[name]
    )


@pytest.fixture
def other() -> Iterator[Bridge[None]]:
    """Another loop, in a thread of its own."""
    bridge = Bridge[None]("other")
    yield bridge
    bridge.shutdown()


async def called(function: Callable[[], object]) -> object:
    result = function()
    return await result if isinstance(result, Coroutine) else result


ORDERS: dict[type[KVConnectorWorker], KVConnectorMetadata] = {
    P2PWorker: P2PMetadata(),
    StoreWorker: StoreMetadata(),
    MultiWorker: MultiMetadata(
        tuple(map(msgspec.msgpack.encode, (P2PMetadata(), StoreMetadata())))
    ),
}
WORKER_CALLS: dict[str, Callable[[KVConnectorWorker], object]] = {
    "register_kv_caches": lambda worker: worker.register_kv_caches(
        {"layer": torch.zeros(2, 4)}
    ),
    "start": lambda worker: worker.start(),
    "bind_connector_metadata": lambda worker: worker.bind_connector_metadata(
        ORDERS[type(worker)]
    ),
    "clear_connector_metadata": lambda worker: worker.clear_connector_metadata(),
    "start_load_kv": lambda worker: worker.start_load_kv(),
    "wait_for_layer_load": lambda worker: worker.wait_for_layer_load("layer"),
    "save_kv_layer": lambda worker: worker.save_kv_layer("layer"),
    "wait_for_save": lambda worker: worker.wait_for_save(),
    "get_finished": lambda worker: worker.get_finished(),
    "call_when_finished": lambda worker: worker.call_when_finished(print),
    "aclose": lambda worker: worker.aclose(),
}


CACHE_CALLS: dict[str, Callable[[Any], object]] = {
    "register_cross_layers_kv_cache": lambda worker: (
        worker.register_cross_layers_kv_cache(torch.zeros(1, 2, 4), ["a"])
    ),
    "follow": lambda worker: worker.follow(None),
}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *itertools.product(NAMES, WORKER_CALLS),
        *itertools.product(NAMES[:2], CACHE_CALLS),
    ],
)
def test_a_worker_is_used_on_one_loop(
    name: str, call: str, other: Bridge[None]
) -> None:
    worker = make_worker(config_of(name), ENGINE)
    misuse = {**WORKER_CALLS, **CACHE_CALLS}[call]
    other.run(worker.start, timeout_s=5)
    try:
        with pytest.raises(WrongLoop):
            asyncio.run(called(lambda: misuse(worker)))
    finally:
        other.run(worker.aclose, timeout_s=5)


@pytest.mark.parametrize("kind", [P2PWorker, StoreWorker])
def test_caches_may_be_registered_before_a_loop_runs(
    kind: type[P2PWorker] | type[StoreWorker], other: Bridge[None]
) -> None:
    name = "P2PConnector" if kind is P2PWorker else "StoreConnector"
    worker = kind(config_of(name), ENGINE)
    worker.register_kv_caches({"layer": torch.zeros(2, 4)})
    worker.call_when_finished(print)
    other.run(worker.start, timeout_s=5)
    other.run(worker.aclose, timeout_s=5)


SCHEDULER_CALLS: dict[str, Callable[[KVConnectorScheduler], object]] = {
    "on_new_request": lambda scheduler: scheduler.on_new_request(REQUEST),
    "get_num_new_matched_tokens": lambda scheduler: (
        scheduler.get_num_new_matched_tokens(REQUEST, 0)
    ),
    "update_state_after_alloc": lambda scheduler: scheduler.update_state_after_alloc(
        REQUEST, ((0, 1),), 0
    ),
    "build_connector_meta": lambda scheduler: scheduler.build_connector_meta(
        KVConnectorStep()
    ),
    "update_connector_output": lambda scheduler: scheduler.update_connector_output(
        KVTransferResults()
    ),
    "request_finished": lambda scheduler: scheduler.request_finished(
        REQUEST, ((0, 1),)
    ),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("call", SCHEDULER_CALLS.values(), ids=SCHEDULER_CALLS)
def test_a_scheduler_is_used_in_one_thread(
    name: str, call: Callable[[KVConnectorScheduler], object], other: Bridge[None]
) -> None:
    scheduler = make_scheduler(config_of(name), ENGINE)
    assert isinstance(scheduler, KVConnectorScheduler)
    call(scheduler)
    call(scheduler)
    with pytest.raises(WrongLoop, match="another thread"):
        other.run(called, lambda: call(scheduler), timeout_s=5)
    scheduler.shutdown()


@pytest.mark.parametrize(
    "call",
    [
        lambda scheduler: scheduler.take_questions(),
        lambda scheduler: scheduler.take_answer(KVAnswer("r", 1)),
    ],
    ids=["questions", "answers"],
)
def test_questions_and_answers_are_taken_in_one_thread(
    call: Callable[[StoreScheduler], object], other: Bridge[None]
) -> None:
    scheduler = StoreScheduler(config_of("StoreConnector"), ENGINE)
    scheduler.take_questions()
    with pytest.raises(WrongLoop):
        other.run(called, lambda: call(scheduler), timeout_s=5)


def test_questions_are_asked_on_one_loop_whatever_thread_takes_them(
    other: Bridge[None],
) -> None:
    scheduler = StoreScheduler(config_of("StoreConnector"), ENGINE)
    scheduler.on_new_request(REQUEST)
    (question,) = scheduler.take_questions()
    other.run(scheduler.start, timeout_s=5)
    other.run(scheduler.ask, question, timeout_s=5)
    calls: list[Callable[[], Coroutine[Any, Any, object]]] = [
        scheduler.start,
        lambda: scheduler.ask(KVQuestion("r", ("key",))),
        scheduler.aclose,
    ]
    for call in calls:
        with pytest.raises(WrongLoop):
            asyncio.run(call())
    other.run(scheduler.aclose, timeout_s=5)


def test_a_scheduler_that_was_only_made_belongs_to_nobody(other: Bridge[None]) -> None:
    scheduler = P2PScheduler(config_of("P2PConnector"), ENGINE)
    other.run(called, lambda: scheduler.on_new_request(REQUEST), timeout_s=5)
    with pytest.raises(WrongLoop):
        scheduler.on_new_request(REQUEST)
