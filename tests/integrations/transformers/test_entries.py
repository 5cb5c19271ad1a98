from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModel,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    StaticCache,
)

from asynckv.abc import KVEntry, KVLookupBuffer
from asynckv.errors import ConfigError, IncompatiblePeer
from asynckv.integrations.transformers import (
    Carried,
    continue_from,
    entry_of,
    export,
    from_blocks,
    generate_from,
    handoff_of,
    load_entry,
    prefill,
    save_entry,
    swap_heads_and_tokens,
    to_blocks,
)
from asynckv.integrations.transformers.entries import DEFAULT_CARRY
from asynckv.types import TensorSpec

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


LOGITS = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]], dtype=torch.bfloat16)


def test_the_first_token_is_the_greedy_one() -> None:
    carried = Carried.of(LOGITS, None, DEFAULT_CARRY)
    assert carried.first_token is not None
    assert carried.first_token.tolist() == [1, 0]
    assert carried.logits is None
    assert list(carried.tensors()) == ["extras.first_token"]


def test_all_that_was_asked_for_is_declared_as_it_will_be(
    model: PreTrainedModel,
) -> None:
    assert Carried.specs(model, 2, ("first_token", "logits", "hidden")) == {
        "extras.first_token": TensorSpec((2,), "int64"),
        "extras.logits": TensorSpec((2, 128), "float32"),
        "hidden": TensorSpec((2, 1, 32), "float32"),
    }


def test_what_cannot_be_carried_is_refused(model: PreTrainedModel) -> None:
    unknown: Any = ("first_token", "mood")
    with pytest.raises(ValueError, match="mood"):
        Carried.specs(model, 1, unknown)


def test_a_model_without_a_head_is_refused() -> None:
    config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    config.vocab_size = 8
    with pytest.raises(ConfigError, match="no language model head"):
        Carried.specs(AutoModel.from_config(config), 1, ())


async def test_an_entry_continues_from_a_file(
    model: PreTrainedModel,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    reference: Any,
    tmp_path: Path,
) -> None:
    await prefill(model, prompt, lookup, carry=("first_token", "hidden"))
    selected = await lookup.drop_select(prompt[0])
    await asyncio.to_thread(save_entry, selected, tmp_path / "prompt")
    entry = await asyncio.to_thread(load_entry, tmp_path / "prompt")
    done = await continue_from(
        handoff_of(model, entry, prompt), max_new_tokens=8, do_sample=False
    )
    assert torch.equal(done.sequences, reference(model, prompt))


def test_every_part_comes_back(tmp_path: Path) -> None:
    part = torch.ones(2, 2, dtype=torch.bfloat16).t()
    entry = KVEntry(
        *(torch.arange(4), torch.ones(4), {"a.b": part}, {"a.b": part}, part),
        extras={"x": part, "y.key": part},
    )
    save_entry(entry, tmp_path / "entry")
    back = load_entry(tmp_path / "entry")
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]
    assert isinstance(back.key, dict)
    assert isinstance(back.value, dict)
    assert back.hidden is not None
    assert back.key.keys() == back.value.keys() == {"a.b"}
    parts = (back.key["a.b"], back.value["a.b"], back.hidden, *back.extras.values())
    assert len(parts) == 5
    assert all(torch.equal(found, part) for found in parts)
    assert back.input_tokens is not None
    assert back.input_tokens.tolist() == [0, 1, 2, 3]


def test_one_tensor_for_all_layers_comes_back_as_one_and_none_as_none(
    tmp_path: Path,
) -> None:
    entry = KVEntry(torch.arange(4), None, torch.ones(2), None, None, {})
    save_entry(entry, tmp_path / "entry")
    back = load_entry(tmp_path / "entry")
    assert isinstance(back.key, torch.Tensor)
    assert torch.equal(back.key, torch.ones(2))
    assert back.value is None


def test_what_is_no_entry_is_refused(tmp_path: Path) -> None:
    save_file({"weights": torch.ones(1)}, tmp_path / "model")
    with pytest.raises(ValueError, match="holds no entry: 'weights' is no tensor"):
        load_entry(tmp_path / "model")


STATES = torch.arange(2 * 7 * 3).reshape(2, 7, 3).float()


def test_heads_and_tokens_change_places_without_a_copy() -> None:
    swapped = swap_heads_and_tokens(STATES)
    assert swapped.shape == (7, 2, 3)
    assert swapped.data_ptr() == STATES.data_ptr()
    assert torch.equal(swap_heads_and_tokens(swapped), STATES)


def test_blocks_hold_the_tokens_in_order_and_zeros_at_the_end() -> None:
    blocks = to_blocks(STATES, 4)
    assert blocks.shape == (2, 2, 4, 3)
    assert torch.equal(blocks[0], STATES[:, :4])
    assert torch.equal(blocks[1, :, :3], STATES[:, 4:])
    assert not blocks[1, :, 3].any()


@pytest.mark.parametrize("block_size", [1, 3, 7, 16])
def test_blocks_are_put_together_again(block_size: int) -> None:
    assert torch.equal(from_blocks(to_blocks(STATES, block_size), 7), STATES)


def test_blocks_that_hold_too_little_are_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks of 4"):
        from_blocks(to_blocks(STATES, 4), 9)
