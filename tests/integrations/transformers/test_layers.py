from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    StaticCache,
    T5Config,
)
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    Fp8QuantizedLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
)

from asynckv.abc import KVLookupBuffer
from asynckv.errors import ConfigError
from asynckv.integrations.transformers import (
    LayerPlan,
    entry_of,
    handoff_of,
    load,
    plan_layers,
    prefill,
)
from asynckv.integrations.transformers.layers import (
    check_cache,
    check_length,
    check_placement,
    read_plans,
)

KINDS = {
    "gqa": "full full full",
    "sliding": "sliding(16) sliding(16) sliding(16)",
    "mixed": "full sliding(16) sliding(16)",
    "chunked": "sliding(16) sliding(16) sliding(16)",
    "latent": "full full full",
    "shared": "sliding(16) full shared",
}
Model = Callable[..., PreTrainedModel]


def llama_of(*layer_types: str) -> LlamaConfig:
    config = LlamaConfig(num_hidden_layers=len(layer_types), hidden_size=32)
    object.__setattr__(config, "layer_types", list(layer_types))
    return config


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_is_what_a_forward_fills(kind: str, model_of: Model) -> None:
    model: Any = model_of(kind)
    plans = plan_layers(model.config)
    assert " ".join(plan.label for plan in plans) == KINDS[kind]
    cache: Any = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(1, 40, dtype=torch.int64), past_key_values=cache)
    for plan, layer in zip(plans, cache.layers, strict=True):
        if plan.kind == "shared":
            assert layer.keys is None
        else:
            shapes = [spec.shape for spec in plan.specs(1, 15, model.dtype).values()]
            assert layer.keys[:, :, -15:].shape == shapes[0]
            assert layer.values[:, :, -15:].shape == shapes[1]
    check_cache(cache, plans)


@pytest.mark.parametrize(
    ("kind", "most", "most_of_same"),
    [("dynamic", 24, 24), ("longrope", 24, 1000), ("alternating", 1000, 1000)],
)
def test_some_kv_is_of_prompts_of_up_to_a_length_alone(
    kind: str, most: int, most_of_same: int, model_of: Model
) -> None:
    config: Any = model_of(kind).config
    for is_same, longest in ((False, most), (True, most_of_same)):
        check_length(config, longest, is_same=is_same)
        if longest < 1000:
            with pytest.raises(ConfigError, match=f"{kind}.*here has 25") as caught:
                check_length(config, 25, is_same=is_same)
            assert "up to 24 tokens" in str(caught.value.hint)


@pytest.mark.parametrize("kind", KINDS)
def test_a_planned_layer_is_what_a_dynamic_cache_has(
    kind: str, model_of: Model
) -> None:
    config = model_of(kind).config
    cache: Any = DynamicCache(config=config)
    for plan, expected in zip(plan_layers(config), cache.layers, strict=True):
        layer: Any = plan.empty_layer()
        assert type(layer) is type(expected)
        assert vars(layer) == vars(expected)


def test_a_config_is_read_once_and_not_layer_by_layer() -> None:
    reads: list[str] = []

    class Noted(LlamaConfig):
        def __getattribute__(self, name: str) -> Any:
            reads.append(name)
            return super().__getattribute__(name)  # type: ignore[no-untyped-call]

    config = Noted(num_hidden_layers=100)
    reads.clear()
    assert len(plan_layers(config)) == 100
    assert len(reads) < 100


def config_of_each_layer() -> LlamaConfig:
    options: dict[str, Any] = {"per_layer_config": {0: {"num_key_value_heads": 4}}}
    return LlamaConfig(num_hidden_layers=2, **options)


async def test_a_config_for_each_layer_is_read_off_the_loop(
    planning_threads: list[str],
) -> None:
    config = config_of_each_layer()
    plans = await read_plans(config)
    assert [plan.heads for plan in plans] == [4, 32]
    assert planning_threads == ["asynckv plan"]
    assert plans == plan_layers(config)


async def test_a_reading_can_be_cancelled() -> None:
    config = config_of_each_layer()
    reading = asyncio.create_task(read_plans(config))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait({reading})
    assert reading.cancelled()


def test_a_sliding_layer_sends_one_position_more_than_it_keeps() -> None:
    plan = LayerPlan(0, "sliding", 16, 2, 8, 8)
    assert plan.rows_to_carry(40) == 16
    assert plan.rows_to_carry(10) == 10
    assert plan.first_needed(39) == 40 - plan.rows_to_carry(40)


@pytest.mark.parametrize(
    "kind", ["linear_attention", "conv", "indexed_attention", "hybrid", "no_such_kind"]
)
def test_a_config_with_a_kind_that_cannot_be_carried_is_refused_by_name(
    kind: str,
) -> None:
    with pytest.raises(ConfigError, match=f"layer 1 is '{kind}'"):
        plan_layers(llama_of("full_attention", kind))


def test_a_model_with_linear_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer 0 is 'linear_attention'"):
        plan_layers(Qwen3NextConfig(num_hidden_layers=4))


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(ConfigError, match="t5 is an encoder-decoder"):
        plan_layers(T5Config())


@pytest.mark.parametrize(
    "layer",
    [
        StaticLayer(max_cache_len=8),
        DynamicIndexedLayer(),
        LinearAttentionLayer(),
        LinearAttentionAndFullAttentionLayer(),
        Fp8QuantizedLayer.__new__(Fp8QuantizedLayer),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_cache_of_another_kind_is_refused_by_name(layer: Any) -> None:
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), layer]
    plans = plan_layers(llama_of("full_attention", "full_attention"))
    with pytest.raises(ConfigError, match=f"layer 1 is '{type(layer).__name__}'"):
        check_cache(cache, plans)


def test_a_static_cache_and_a_cache_of_fewer_layers_are_refused() -> None:
    config = llama_of("full_attention", "full_attention")
    with pytest.raises(ConfigError, match="layer 0 is 'StaticLayer'"):
        check_cache(StaticCache(config=config, max_cache_len=8), plan_layers(config))
    with pytest.raises(ConfigError, match="0 layers"):
        check_cache(DynamicCache(), plan_layers(config))


@pytest.mark.parametrize("on", [{}, {"": 0}, {"a": 0, "b": "cuda:0", "c": "cuda"}])
def test_a_model_on_one_device_is_taken(on: dict[str, object], model: Any) -> None:
    placed = copy.copy(model)
    placed.hf_device_map = on
    check_placement(placed)


async def test_a_model_spread_over_devices_is_refused_by_name(
    model: Any, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    entry = entry_of(model, model(prompt).past_key_values, prompt)
    spread = copy.copy(model)
    spread.hf_device_map = {"embed": 0, "layers.0": 1, "layers.1": "cpu"}
    with pytest.raises(ConfigError, match="over cpu, cuda:0, cuda:1:"):
        await prefill(spread, prompt, lookup)
    with pytest.raises(ConfigError, match="device_map"):
        load(spread, prompt, lookup)
    with pytest.raises(ConfigError, match="device_map"):
        handoff_of(spread, entry)
