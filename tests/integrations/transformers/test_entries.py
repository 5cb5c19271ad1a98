from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from asynckv.abc import KVLookupBuffer
from asynckv.errors import ConfigError, IncompatiblePeer
from asynckv.integrations.transformers import (
    Carried,
    entry_of,
    export,
    generate_from,
)

Model = Callable[..., PreTrainedModel]
Tokens = Callable[..., torch.Tensor]
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def filled(model: Any, ids: torch.Tensor, cache: DynamicCache) -> DynamicCache:
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("kind", ["gqa", "sliding", "alternating"])
async def test_a_cache_made_without_the_config_is_cut_to_what_travels(
    kind: str,
    model_of: Model,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    reference: Tokens,
) -> None:
    model = model_of(kind)
    # It keeps every position, and only its masks are wrong once it is continued.
    cache = filled(model, prompt, DynamicCache())
    own = filled(model, prompt, DynamicCache(config=model.config))
    for plain, sliding in zip(cache.layers, own.layers, strict=True):
        layer: Any = sliding
        rows = layer.keys.shape[-2]
        plain_layer: Any = plain
        assert torch.equal(plain_layer.keys[:, :, -rows:], layer.keys)
    await export(model, cache, prompt, lookup)
    done = await generate_from(model, prompt, lookup, **GREEDY)
    assert torch.equal(done.sequences, reference(model, prompt))
    assert done.prompt_positions_computed == 1


async def test_what_a_sliding_layer_has_dropped_is_missed_by_name(
    model_of: Model, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    model = model_of("sliding")
    cache = filled(model, prompt, DynamicCache(config=model.config))
    with pytest.raises(RuntimeError, match="does not track past"):
        cache.crop(-1)
    await export(model, cache, prompt, lookup)
    with pytest.raises(IncompatiblePeer, match="reaches back 1 positions") as caught:
        await generate_from(model, prompt, lookup, **GREEDY)
    assert caught.value.field == "window"
    assert await lookup.peek(prompt[0]) == 40


@pytest.mark.parametrize("kind", ["gqa", "sliding", "alternating"])
async def test_a_carried_token_makes_up_for_what_was_dropped(
    kind: str,
    model_of: Model,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    reference: Tokens,
) -> None:
    model = model_of(kind)
    cache = filled(model, prompt, DynamicCache(config=model.config))
    first = reference(model, prompt)[:, 40]
    await export(model, cache, prompt, lookup, carried=Carried(first_token=first))
    done = await generate_from(model, prompt, lookup, **GREEDY)
    assert torch.equal(done.sequences, reference(model, prompt))


@pytest.mark.parametrize("kind", ["gqa", "sliding"])
async def test_a_conversation_goes_on_elsewhere(
    kind: str,
    model_of: Model,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    reference: Tokens,
) -> None:
    model: Any = model_of(kind)
    cache = DynamicCache(config=model.config)
    told = reference(model, prompt, past_key_values=cache)
    await export(model, cache, told[:, :-1], lookup)
    asked = torch.cat([told, prompt[:, :5]], dim=1)
    done = await generate_from(model, asked, lookup, **GREEDY)
    assert torch.equal(done.sequences, reference(model, asked))
    assert done.prompt_positions_computed == 6


def test_a_cache_that_holds_other_positions_is_refused(
    model: PreTrainedModel, prompt: torch.Tensor
) -> None:
    cache = filled(model, prompt, DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="holds 40 positions, input_ids 39"):
        entry_of(model, cache, prompt[:, :39])
    with pytest.raises(ValueError, match="is empty"):
        entry_of(model, DynamicCache(config=model.config), prompt)


def test_a_cache_of_another_shape_or_dtype_is_refused(
    model_of: Model, prompt: torch.Tensor
) -> None:
    model = model_of("gqa")
    cache = filled(model, prompt, DynamicCache(config=model.config))
    for other in (model_of("full"), model_of("gqa", torch.bfloat16)):
        with pytest.raises(ValueError, match="this prompt and model need"):
            entry_of(other, cache, prompt)


def test_a_static_cache_is_refused_by_name(
    model: PreTrainedModel, prompt: torch.Tensor
) -> None:
    cache = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(ConfigError, match="layer 0 is 'StaticLayer'"):
        entry_of(model, cache, prompt)
