from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from asynckv.abc import KVLookupBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.errors import EntryAborted
from asynckv.integrations.transformers import (
    Generated,
    LayerEvent,
    continue_from,
    entry_of,
    export,
    generate_from,
    load,
    prefill,
)
from asynckv.integrations.transformers.consumer import tensors_of
from asynckv.tensors.views import spec_of
from asynckv.testing import sweep_cancellation

KINDS = (
    "full",
    "gqa",
    "sliding",
    "mixed",
    "alternating",
    "chunked",
    "latent",
    "longrope",
    "shared",
)
MAIN_KINDS = ("gqa", "sliding", "alternating")
Model = Callable[..., PreTrainedModel]
Tokens = Callable[..., torch.Tensor]
Padded = tuple[torch.Tensor, torch.Tensor]
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


class Spy(BaseStreamer):
    """Remembers what was streamed."""

    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.is_ended = False

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.flatten().tolist())

    def end(self) -> None:
        self.is_ended = True


def filled(model: Any, ids: torch.Tensor, config: Any = None) -> DynamicCache:
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_are_those_of_plain_generate(
    kind: str,
    model_of: Model,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    reference: Tokens,
) -> None:
    model = model_of(kind)
    expected = reference(model, prompt)
    for use_carried in (True, False):
        await prefill(model, prompt, lookup)
        done = await generate_from(
            model, prompt, lookup, use_carried=use_carried, **GREEDY
        )
        assert torch.equal(done.sequences, expected)
        assert done.prompt_positions_computed == (0 if use_carried else 1)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_padded_batch_has_the_tokens_of_plain_generate(
    kind: str,
    model_of: Model,
    lookup: KVLookupBuffer,
    padded: Padded,
    reference: Tokens,
) -> None:
    model, (ids, mask) = model_of(kind), padded
    expected = reference(model, ids, mask)
    for use_carried in (True, False):
        await prefill(model, ids, lookup, attention_mask=mask)
        done = await generate_from(
            model, ids, lookup, attention_mask=mask, use_carried=use_carried, **GREEDY
        )
        assert torch.equal(done.sequences, expected)


@pytest.mark.parametrize(("ends", "is_padding"), [(None, True), ([1, 0], False)])
async def test_without_a_mask_pad_tokens_are_what_they_are_to_plain_generate(
    ends: list[int] | None,
    is_padding: bool,
    model: PreTrainedModel,
    lookup: KVLookupBuffer,
    padded: Padded,
    reference: Tokens,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, mask = padded[0] * padded[1], padded[1]
    monkeypatch.setattr(model.generation_config, "pad_token_id", 0)
    monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
    expected = reference(model, ids, mask if is_padding else None)
    await prefill(model, ids, lookup)
    done = await generate_from(model, ids, lookup, **GREEDY)
    assert torch.equal(done.sequences, expected)
    assert torch.equal(done.sequences, model.generate(ids, **GREEDY))  # type: ignore[operator]


@pytest.mark.parametrize("kind", MAIN_KINDS)
async def test_half_precision_has_the_tokens_of_the_same_split(
    kind: str,
    model_of: Model,
    lookup: KVLookupBuffer,
    padded: Padded,
    prompt: torch.Tensor,
    split_reference: Tokens,
) -> None:
    model, (ids, mask) = model_of(kind, torch.bfloat16), padded
    await prefill(model, prompt, lookup)
    one = await generate_from(model, prompt, lookup, **GREEDY)
    assert torch.equal(one.sequences, split_reference(model, prompt))
    await prefill(model, ids, lookup, attention_mask=mask)
    batch = await generate_from(model, ids, lookup, attention_mask=mask, **GREEDY)
    assert torch.equal(batch.sequences, split_reference(model, ids, mask))


@pytest.mark.parametrize("kind", MAIN_KINDS)
@pytest.mark.parametrize("held", [1, 16, 39])
async def test_the_rest_of_a_longer_prompt_is_computed_here(
    kind: str,
    held: int,
    model_of: Model,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    reference: Tokens,
) -> None:
    model = model_of(kind)
    await prefill(model, prompt[:, :held], lookup)
    done = await generate_from(model, prompt, lookup, **GREEDY)
    assert torch.equal(done.sequences, reference(model, prompt))
    assert done.prompt_positions_computed == 40 - held
    assert done.matched_tokens == held


async def test_an_entry_for_a_longer_prompt_is_cut(
    model: PreTrainedModel,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    reference: Tokens,
) -> None:
    await prefill(model, prompt, lookup)
    done = await generate_from(model, prompt[:, :30], lookup, **GREEDY)
    assert torch.equal(done.sequences, reference(model, prompt[:, :30]))
    assert done.prompt_positions_computed == 1


async def test_any_entry_brings_its_own_prompt(
    model: PreTrainedModel, lookup: KVLookupBuffer, padded: Padded, reference: Tokens
) -> None:
    ids, mask = padded
    await prefill(model, ids, lookup, attention_mask=mask)
    done = await generate_from(model, None, lookup, **GREEDY)
    assert torch.equal(done.sequences, reference(model, ids, mask))


@pytest.mark.parametrize("carry", [("first_token",), ("logits",), ("hidden",)])
async def test_the_only_token_needs_no_forward(
    carry: Any,
    model: PreTrainedModel,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    reference: Tokens,
) -> None:
    await prefill(model, prompt, lookup, carry=carry)
    spy = Spy()
    done = await generate_from(
        model, prompt, lookup, max_new_tokens=1, do_sample=False, streamer=spy
    )
    assert torch.equal(done.sequences, reference(model, prompt, max_new_tokens=1))
    assert done.prompt_positions_computed == 0
    assert spy.values == [prompt[0].tolist(), [int(done.sequences[0, -1])]]
    assert spy.is_ended


async def test_a_streamer_sees_what_plain_generate_streams(
    model: PreTrainedModel,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    reference: Tokens,
) -> None:
    plain, ours = Spy(), Spy()
    reference(model, prompt, streamer=plain)
    await prefill(model, prompt, lookup)
    await generate_from(model, prompt, lookup, streamer=ours, **GREEDY)
    assert (ours.values, ours.is_ended) == (plain.values, True)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"repetition_penalty": 1.7},
        {"do_sample": True},
        {"min_new_tokens": 2},
        {"no_repeat_ngram_size": 1},
        {"max_new_tokens": None, "max_length": 45},
        {"logits_processor": [lambda ids, scores: scores.roll(1, -1)]},
    ],
    ids=lambda options: ",".join(options),
)
async def test_what_the_producer_did_not_choose_is_chosen_here(
    options: dict[str, Any],
    model: PreTrainedModel,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    reference: Tokens,
) -> None:
    torch.manual_seed(3)
    expected = reference(model, prompt, **options)
    await prefill(model, prompt, lookup)
    torch.manual_seed(3)
    done = await generate_from(model, prompt, lookup, **GREEDY | options)
    assert torch.equal(done.sequences, expected)
    assert done.prompt_positions_computed == 1


CANNOT_GO_ON: list[dict[str, Any]] = [
    {"use_cache": False},
    {"prompt_lookup_num_tokens": 3},
    {"assistant_early_exit": 1},
]


@pytest.mark.parametrize("is_config", [False, True])
@pytest.mark.parametrize("options", CANNOT_GO_ON, ids=lambda options: ",".join(options))
async def test_what_transformers_does_wrongly_from_a_cache_is_refused(
    options: dict[str, Any],
    is_config: bool,
    model: PreTrainedModel,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
) -> None:
    given = {"generation_config": GenerationConfig(**options)} if is_config else options
    [(option, value)] = options.items()
    with pytest.raises(ValueError, match=f"with {option}={value} cannot go on"):
        await generate_from(model, prompt, lookup, **given)  # before anything matches
    await prefill(model, prompt, lookup)
    async with load(model, prompt, lookup) as handoff:
        with pytest.raises(ValueError, match=next(iter(options))):
            await continue_from(handoff, **given)


async def test_an_assistant_model_is_refused(
    model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match="assistant_model"):
        await generate_from(model, prompt, lookup, assistant_model=model)


async def test_rows_end_where_plain_generate_ends_them(
    model: PreTrainedModel, lookup: KVLookupBuffer, padded: Padded, reference: Tokens
) -> None:
    ids, mask = padded
    firsts = reference(model, ids, mask, max_new_tokens=1)[:, -1].tolist()
    for ends in (firsts[:1], firsts, [firsts[1]]):
        options = {"eos_token_id": ends, "pad_token_id": 0}
        expected = reference(model, ids, mask, **options)
        await prefill(model, ids, lookup, attention_mask=mask)
        done = await generate_from(
            model, ids, lookup, attention_mask=mask, **GREEDY | options
        )
        assert torch.equal(done.sequences, expected)


@pytest.mark.parametrize("samples", [False, True])
async def test_a_generation_config_says_as_much_as_options_do(
    samples: bool, model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    await prefill(model, prompt, lookup)
    config = GenerationConfig(max_new_tokens=8, do_sample=samples)
    done = await generate_from(model, prompt, lookup, generation_config=config)
    assert done.sequences.shape == (1, 48)
    assert done.prompt_positions_computed == (1 if samples else 0)


async def test_all_that_generate_returns_is_there(
    model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    await prefill(model, prompt, lookup)
    options = {"return_dict_in_generate": True, "output_logits": True}
    done = await generate_from(model, prompt, lookup, **GREEDY | options)
    assert len(getattr(done.output, "logits", ())) == 8
    assert done.sequences.shape == (1, 48)


@pytest.mark.parametrize("layer", [0, 1, 2])
async def test_a_zeroed_layer_changes_the_tokens(
    layer: int,
    model: PreTrainedModel,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    reference: Tokens,
) -> None:
    cache = filled(model, prompt)
    states: Any = cache.layers[layer]
    states.values.zero_()
    await export(model, cache, prompt, lookup)
    done = await generate_from(model, prompt, lookup, **GREEDY)
    assert not torch.equal(done.sequences, reference(model, prompt))


async def test_the_first_forward_starts_while_layers_are_on_the_wire(
    model: PreTrainedModel,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    reference: Tokens,
) -> None:
    entry = entry_of(model, filled(model, prompt), prompt)
    tensors = tensors_of(entry)
    used = asyncio.Event()

    def observe(event: LayerEvent) -> None:
        if (event.layer, event.what) == (0, "used"):
            used.set()

    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    async with lookup.open_insert(entry.input_tokens, None, specs) as writer:
        running = asyncio.create_task(
            generate_from(model, prompt, lookup, observe=observe, **GREEDY)
        )
        late = {name for name in tensors if name.startswith("layers.2")}
        for name in [*(tensors.keys() - late), *sorted(late)]:
            if name == "layers.2.key":
                await used.wait()
            await writer.put(name, tensors[name])
    assert torch.equal((await running).sequences, reference(model, prompt))


async def abort_after(
    lookup: LookupBuffer, model: PreTrainedModel, ids: torch.Tensor, last: str
) -> None:
    """Insert a prompt's KV up to one tensor, then fail as a producer does."""
    entry = entry_of(model, filled(model, ids), ids)
    tensors = tensors_of(entry)
    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    async with lookup.open_insert(entry.input_tokens, None, specs) as writer:
        for name in ("extras.fingerprint", "layers.0.key", "layers.0.value"):
            await writer.put(name, tensors[name])
            if name == last:
                break
        while not lookup.statistics().leased:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        raise InterruptedError


@pytest.mark.parametrize("last", ["extras.fingerprint", "layers.0.value"])
async def test_a_producer_that_fails_ends_the_forward(
    last: str, model: PreTrainedModel, lookup: LookupBuffer, prompt: torch.Tensor
) -> None:
    running = asyncio.create_task(
        generate_from(model, prompt, lookup, use_carried=False, **GREEDY)
    )
    with pytest.raises(InterruptedError):
        await abort_after(lookup, model, prompt, last)
    with pytest.raises(EntryAborted):
        await running


async def test_a_producer_that_fails_after_the_last_layer_fails_the_generation(
    model: PreTrainedModel, lookup: LookupBuffer, prompt: torch.Tensor
) -> None:
    entry = entry_of(model, filled(model, prompt), prompt)
    tensors, used = tensors_of(entry), asyncio.Event()
    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    specs["extras.late"] = spec_of(torch.ones(1))

    def observe(event: LayerEvent) -> None:
        if (event.layer, event.what) == (2, "used"):
            used.set()

    running = asyncio.create_task(
        generate_from(
            model, prompt, lookup, use_carried=False, observe=observe, **GREEDY
        )
    )
    with pytest.raises(InterruptedError):
        async with lookup.open_insert(entry.input_tokens, None, specs) as writer:
            for name, tensor in tensors.items():
                await writer.put(name, tensor)
            await used.wait()
            raise InterruptedError
    with pytest.raises(EntryAborted):
        await running


async def test_a_failed_generation_gives_the_entry_back(
    model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    await prefill(model, prompt, lookup)
    with pytest.raises(ValueError, match="no_such_option"):
        async with load(model, prompt, lookup) as handoff:
            await continue_from(handoff, no_such_option=1)
    with pytest.raises(ValueError, match="no_such_option"):
        await generate_from(model, prompt, lookup, no_such_option=1)
    async with load(model, prompt, lookup) as handoff:
        assert handoff.attempt == 3


async def test_a_cancelled_generation_leaves_nothing_and_loses_nothing(
    model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    ids = prompt.repeat(1, 30)  # large enough for copies to wait
    cache = filled(model, ids)

    async def before() -> None:
        await export(model, cache, ids, lookup)

    async def generate() -> Generated:
        return await generate_from(model, ids, lookup, use_carried=False, **GREEDY)

    async def check(_: int, __: object, outcome: Any) -> None:
        if not outcome.cancelled:
            assert outcome.value.sequences.shape == (1, 1208)
        elif await lookup.peek(ids[0]):
            await lookup.drop_select(ids[0])
        assert await lookup.peek(ids[0]) == 0

    counts = await sweep_cancellation(generate, check, before=before)
    assert counts.cancelled >= 4
