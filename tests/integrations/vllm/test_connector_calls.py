"""Each call as vLLM makes it, of a producer and a consumer; no engine is started."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from harness.vllm_engines import PREFILL, free_url

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_is_imported")]

BLOCK, BLOCKS, TOKENS = 16, 6, 40
LAYERS: Final = ("layers.0", "layers.1")
SAVED, LOADED = [3, 1, 4], [0, 5, 2]


class Engine:
    """The two roles of one engine, told what vLLM's scheduler and worker tell them."""

    def __init__(self, role: str, *, groups: int = 1, **extra: Any) -> None:
        from vllm.config import KVTransferConfig

        from asynckv.integrations.vllm.connector import AsyncKVConnector

        self.cache, self.views = _cache_of(groups)
        transfer = KVTransferConfig(
            kv_connector="AsyncKVConnector",
            kv_role=role,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        )
        self.config = _config_of(transfer)
        self.scheduler, self.worker = (
            AsyncKVConnector(self.config, role, self.cache) for role in _roles()
        )
        self.blocks: dict[str, Any] = {}
        self.all_sent: list[str] = []
        manager = SimpleNamespace(get_block_ids=self.blocks.get, block_pool=None)
        self.scheduler.bind_kv_cache_manager(manager)
        self.worker.register_kv_caches(self.views)
        told = {0: self.worker.get_handshake_metadata()}
        self.scheduler.set_xfer_handshake_metadata(told)

    def add(self, name: str, params: Any, block_ids: list[int]) -> tuple[Any, Any]:
        """Return a request that has blocks, and what is said of its tokens."""
        request = _request(name, params)
        self.scheduler.on_new_request(request)
        found = self.scheduler.get_num_new_matched_tokens(request, 0)
        self.blocks[name] = (block_ids,) * len(self.cache.kv_cache_groups)
        blocks = SimpleNamespace(get_block_ids=lambda: self.blocks[name])
        self.scheduler.update_state_after_alloc(request, blocks, found[0] or 0)
        return request, found

    def order(self, *computed: str, preempted: frozenset[str] = frozenset()) -> Any:
        """Return what is ordered of a step in which these compute their prompt."""
        return self.scheduler.build_connector_meta(_output(computed, preempted))

    def order_and_begin(self) -> None:
        """Begin a step, and look at nothing that ended."""
        self.worker.bind_connector_metadata(self.order())
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()

    def run(self, meta: Any) -> Any:
        """Take the worker through a step; return what ended in it."""
        self.worker.handle_preemptions(meta)
        self.worker.bind_connector_metadata(meta)
        assert self.worker.has_connector_metadata()
        self.worker.start_load_kv(None)
        for layer in (*LAYERS, "reads another layer's"):
            self.worker.wait_for_layer_load(layer)
            self.worker.save_kv_layer(layer, torch.empty(0), None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        ended = SimpleNamespace(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.all_sent += ended.finished_sending or ()
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(ended)
        return ended

    def sent(self) -> list[str]:
        """Take steps until blocks were sent; return whose they ever were."""
        while not self.all_sent:
            self.run(self.order())
            threading.Event().wait(0.002)
        return self.all_sent

    def step_until(self, what: str) -> Any:
        """Take steps until one in which that ended."""
        while not getattr(ended := self.run(self.order()), what):
            threading.Event().wait(0.002)
        return ended

    def shutdown(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


def _roles() -> tuple[Any, Any]:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    return KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER


def _cache_of(groups: int) -> tuple[Any, dict[str, torch.Tensor]]:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheGroupSpec,
        KVCacheLayout,
    )
    from vllm.v1.worker.utils import allocate_kv_cache

    options: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8}
    spec = FullAttentionSpec(**options, dtype=torch.float32)
    named = [list(LAYERS)] if groups == 1 else [[layer] for layer in LAYERS]
    layout = KVCacheLayout.LBHNC
    engine = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
        ),
    )
    kinds = [KVCacheGroupSpec(names, spec) for names in named]
    config = get_kv_cache_config_from_groups(engine, kinds, 2**30)
    config.kv_cache_layout = layout.name
    sizes = [BLOCK] * groups
    views = allocate_kv_cache(config, torch.device("cpu"), layout, sizes)
    for view in views.values():
        view.copy_(torch.rand(view.shape))
    return config, views


def _config_of(transfer: Any) -> Any:
    backend = types.new_class("Attention")
    layer = SimpleNamespace(get_attn_backend=lambda: backend)
    hf_config = SimpleNamespace(to_dict=lambda: {"layers": 2})
    return SimpleNamespace(
        kv_transfer_config=transfer,
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="auto"),
        compilation_config=SimpleNamespace(
            static_forward_context=dict.fromkeys(LAYERS, layer)
        ),
        model_config=SimpleNamespace(
            model="tiny",
            dtype="float32",
            revision=None,
            quantization=None,
            hf_config=hf_config,
        ),
        parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1),
    )


def _request(name: str, params: Any) -> Any:
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=list(range(TOKENS)),
        prompt_embeds=None,
        kv_transfer_params=params,
        cache_salt=None,
        lora_request=None,
        mm_features=(),
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
    )


def _output(computed: tuple[str, ...], preempted: frozenset[str]) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=0) for name in computed
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens=dict.fromkeys(computed, TOKENS),
        preempted_req_ids=set(preempted),
    )


@pytest.fixture(params=[1, 2])
def groups(request: pytest.FixtureRequest) -> int:
    """How many groups of layers have blocks of their own."""
    return int(request.param)


@pytest.fixture
def pair(groups: int) -> Iterator[tuple[Engine, Engine]]:
    url = free_url()
    there = Engine("kv_producer", groups=groups, listen=url, layerwise=True)
    here = Engine("kv_consumer", groups=groups, peers=[url])
    yield there, here
    here.shutdown()
    there.shutdown()


def prefill(there: Engine, name: str = "p") -> dict[str, Any]:
    """Return what the decoding request carries."""
    request, found = there.add(name, dict(PREFILL), SAVED)
    assert found == (0, False)
    meta = there.order(name)
    is_held, params = there.scheduler.request_finished_all_groups(
        request, there.blocks[name]
    )
    assert is_held and there.scheduler.has_pending_push_work()
    assert isinstance(params, dict)
    assert params["incarnations"]  # of the worker, told by its handshake
    there.run(meta)
    return params


def test_blocks_move_and_each_side_is_told_once(
    pair: tuple[Engine, Engine], caplog: pytest.LogCaptureFixture
) -> None:
    there, here = pair
    before = {layer: view.clone() for layer, view in here.views.items()}
    params = prefill(there)
    _, found = here.add("d", params, LOADED)
    assert found == (TOKENS, True)
    ended = here.step_until("finished_recving")
    assert ended.finished_recving == {"d"} and not ended.failed_recving
    assert not ended.invalid_block_ids
    assert there.sent() == ["p"]
    assert not there.scheduler.has_pending_push_work()
    for layer, view in here.views.items():
        assert torch.equal(view[LOADED], there.views[layer][SAVED])
        rest = [block for block in range(BLOCKS) if block not in LOADED]
        assert torch.equal(view[rest], before[layer][rest])
    assert there.run(there.order()).kv_connector_worker_meta is None
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


@pytest.mark.parametrize("groups", [1], indirect=True)
def test_a_layer_leaves_before_the_next_is_computed(
    pair: tuple[Engine, Engine],
) -> None:
    there, here = pair
    request, _ = there.add("p", dict(PREFILL), SAVED)
    meta = there.order("p")
    _, params = there.scheduler.request_finished(request, SAVED)
    there.worker.bind_connector_metadata(meta)
    there.worker.start_load_kv(None)
    here.add("d", params, LOADED)
    here.order_and_begin()
    for layer in LAYERS:
        there.worker.save_kv_layer(layer, torch.empty(0), None)
        while not torch.equal(here.views[layer][LOADED], there.views[layer][SAVED]):
            threading.Event().wait(0.002)
    there.worker.wait_for_save()
    assert here.step_until("finished_recving").finished_recving == {"d"}


@pytest.mark.parametrize("groups", [1], indirect=True)
def test_blocks_that_are_overwritten_are_let_go_of_first(
    pair: tuple[Engine, Engine],
) -> None:
    there, _ = pair
    there.add("p", dict(PREFILL), SAVED)
    saves = there.order("p")
    meta = there.order(preempted=frozenset({"p", "another"}))
    assert meta.must_be_quiet == {"p"}
    there.run(saves)
    there.run(meta)
    assert there.sent() == ["p"]


def test_blocks_are_read_before_a_preemption_lets_them_be_overwritten() -> None:
    url, room = free_url(), "18KiB"  # for one prompt: the second one waits
    there = Engine("kv_producer", listen=url, max_bytes=room)
    here = Engine("kv_consumer", peers=[url])
    try:
        first = prefill(there)
        request, _ = there.add("second", dict(PREFILL), SAVED)
        there.run(there.order("second"))
        before = {layer: view[SAVED].clone() for layer, view in there.views.items()}
        there.worker.handle_preemptions(there.order(preempted=frozenset({"second"})))
        for view in there.views.values():
            view.zero_()
        second = there.scheduler.request_finished(request, SAVED)[1]
        for name, params in (("d", first), ("e", second)):
            here.add(name, params, LOADED)
            assert not here.step_until("finished_recving").invalid_block_ids
        for layer, view in here.views.items():
            assert torch.equal(view[LOADED], before[layer])
    finally:
        here.shutdown()
        there.shutdown()


@pytest.mark.parametrize("groups", [1], indirect=True)
def test_an_engine_of_one_group_may_tell_of_its_blocks_alone(
    pair: tuple[Engine, Engine],
) -> None:
    there, here = pair
    request, _ = there.add("p", dict(PREFILL), SAVED)
    meta = there.order("p")
    is_held, params = there.scheduler.request_finished(request, SAVED)
    assert is_held and params
    there.run(meta)
    here.add("d", params, LOADED)
    assert here.step_until("finished_recving").finished_recving == {"d"}
    nobody = _request("nobody's", None)
    assert there.scheduler.request_finished(nobody, SAVED) == (False, None)


def test_a_load_that_fails_is_told_by_blocks_or_by_request(groups: int) -> None:
    url = free_url()
    here = Engine("kv_consumer", groups=groups, peers=[url], load_timeout_s=0.2)
    gone = {"do_remote_prefill": True, "transfer_id": "gone", "peer": url}
    try:
        assert here.add("d", gone, LOADED)[1] == (TOKENS, True)
        ended = here.step_until("finished_recving")
        assert ended.finished_recving == {"d"}
        told = ended.invalid_block_ids, ended.failed_recving
        assert told == ((set(LOADED), set()) if groups == 1 else (set(), {"d"}))
        assert not here.worker.get_block_ids_with_load_errors()
        assert here.worker.build_connector_worker_meta() is None
        counted: Any = here.scheduler.get_kv_connector_stats()
        assert counted.to_dict()["failed_loads"] == 1
    finally:
        here.shutdown()


@pytest.mark.parametrize("groups", [1], indirect=True)
def test_a_worker_tells_of_ends_in_the_order_of_vllm(
    pair: tuple[Engine, Engine],
) -> None:
    there, here = pair
    here.add("d", prefill(there), LOADED)
    here.order_and_begin()
    while not any(ended := here.worker.get_finished(set())):
        threading.Event().wait(0.002)
    assert ended == (set(), {"d"})
    counted: Any = here.worker.get_kv_connector_stats()
    assert counted.to_dict()["loaded_bytes"] > 0


@pytest.mark.parametrize("groups", [1], indirect=True)
def test_each_role_refuses_what_the_other_does(pair: tuple[Engine, Engine]) -> None:
    _, here = pair
    with pytest.raises(RuntimeError, match="not a worker's"):
        here.scheduler.wait_for_save()
    with pytest.raises(RuntimeError, match="not the scheduler's"):
        here.worker.on_new_request(_request("d", None))


@pytest.mark.parametrize("groups", [1], indirect=True)
def test_what_is_of_other_connectors_is_left_alone(pair: tuple[Engine, Engine]) -> None:
    there, _ = pair
    foreign: Any = object()
    there.worker.handle_preemptions(foreign)
    there.worker.bind_connector_metadata(foreign)
    there.worker.start_load_kv(None)
    there.worker.wait_for_save()
    there.scheduler.set_xfer_handshake_metadata({0: foreign})
    # Not asked for, of a request that moves nothing.
    blocks = SimpleNamespace(get_block_ids=pytest.fail)
    request = _request("nobody's", None)
    there.scheduler.on_new_request(request)
    assert there.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    there.scheduler.update_state_after_alloc(request, blocks, 0)


def test_only_what_a_producer_promised_must_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    url = free_url()
    found = {}
    for role, extra in (
        ("kv_producer", {"listen": url}),
        ("kv_consumer", {"peers": [url]}),
        ("kv_both", {"mode": "store", "store": url}),
    ):
        engine = Engine(role, **extra)
        sources = engine.scheduler.get_external_cache_hit_sources(None, 1)
        found[role] = (engine.scheduler.requires_kv_delivery, *sources)
        engine.shutdown()
    assert found == {
        "kv_producer": (True, CacheHitSource.P2P),
        "kv_consumer": (False, CacheHitSource.P2P),
        "kv_both": (False, CacheHitSource.EXTERNAL_UNSPECIFIED),
    }
    assert "handshake did not come" not in caplog.text


def test_options_decide_on_layout_and_graphs() -> None:
    from asynckv.integrations.vllm.connector import AsyncKVConnector

    for layout in (None, "LBHNC"):
        extra = {} if layout is None else {"kv_cache_layout": layout}
        transfer = SimpleNamespace(kv_connector_extra_config=extra)
        config: Any = SimpleNamespace(kv_transfer_config=transfer)
        assert AsyncKVConnector.get_required_kvcache_layout(config) == layout
    graphs = AsyncKVConnector.requires_piecewise_for_cudagraph
    assert (graphs({}), graphs({"layerwise": True})) == (False, True)
