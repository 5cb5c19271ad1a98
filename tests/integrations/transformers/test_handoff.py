"""The table of ways to continue, row by row: the naive way, and the adapter's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from asynckv.abc import KVLookupBuffer
from asynckv.errors import ConfigError, EntryAborted
from asynckv.integrations.transformers import (
    Handoff,
    ReceivingCache,
    continue_from,
    entry_of,
    handoff_of,
    plan_layers,
    prefill,
)
from asynckv.integrations.transformers.forward import Forward, ForwardStopped
from asynckv.integrations.transformers.handoff import ReceivedTensors

Model = Callable[..., PreTrainedModel]
Tokens = Callable[..., torch.Tensor]


def filled(model: Any, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    return cache


def go_on(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    options = {"max_new_tokens": 8, "do_sample": False} | options
    sequences: torch.Tensor = model.generate(ids, **options)
    return sequences


def check_goes_on(
    model: Any, expected: torch.Tensor, kwargs: Any, count: int = 8
) -> None:
    done = model.generate(**kwargs, max_new_tokens=count, do_sample=False)
    assert torch.equal(done, expected)


async def handed(
    model: PreTrainedModel, ids: torch.Tensor, lookup: KVLookupBuffer
) -> Handoff:
    await prefill(model, ids, lookup)
    return handoff_of(model, await lookup.drop_select(ids[0]), ids)


@pytest.mark.parametrize(("entry", "length"), [(20, 40), (40, 20), (12, 24), (24, 12)])
async def test_what_a_longer_prompt_has_other_kv_for_is_no_part_of_it(
    entry: int, length: int, model_of: Model, prompt: torch.Tensor, lookup: Any
) -> None:
    model = model_of("longrope")  # of two: up to 24 tokens, and beyond
    ids = prompt[:, :length]
    await prefill(model, prompt[:, :entry], lookup)
    kept = await lookup.drop_select(prompt[0, : min(entry, length)])
    if 40 in (entry, length):
        with pytest.raises(ConfigError, match="other KV.*one here has 40"):
            handoff_of(model, kept, ids)
        return
    done = await continue_from(
        handoff_of(model, kept, ids), max_new_tokens=8, do_sample=False
    )
    assert torch.equal(done.sequences, go_on(model, ids))


async def test_a_whole_prompt_over_a_whole_cache_is_wrong_unless_it_is_cut(
    model: Any, lookup: KVLookupBuffer, prompt: torch.Tensor, reference: Tokens
) -> None:
    mask = torch.ones_like(prompt)
    naive = go_on(
        model, prompt, attention_mask=mask, past_key_values=filled(model, prompt)
    )
    assert not torch.equal(naive, reference(model, prompt))
    kwargs = (await handed(model, prompt, lookup)).generate_kwargs()
    assert kwargs.keys() == {"input_ids", "attention_mask", "past_key_values"}
    assert kwargs["past_key_values"].get_seq_length() == 39
    check_goes_on(model, reference(model, prompt), kwargs)


async def test_a_prompt_with_its_first_token_uses_the_whole_cache(
    model: Any, lookup: KVLookupBuffer, prompt: torch.Tensor, reference: Tokens
) -> None:
    handoff = await handed(model, prompt, lookup)
    kwargs = handoff.generate_kwargs(await handoff.first_token())
    assert kwargs["past_key_values"].get_seq_length() == 40
    assert kwargs["attention_mask"].shape == kwargs["input_ids"].shape == (1, 41)
    check_goes_on(model, reference(model, prompt), kwargs, 7)
    assert handoff.prompt_positions_computed == 0


async def test_only_the_new_token_with_the_full_mask_gives_only_new_tokens(
    model: Any, lookup: KVLookupBuffer, prompt: torch.Tensor, reference: Tokens
) -> None:
    kwargs = (await handed(model, prompt, lookup)).generate_kwargs()
    kwargs["input_ids"] = kwargs["input_ids"][:, -1:]
    check_goes_on(model, reference(model, prompt)[:, 39:], kwargs)


async def test_only_the_new_token_without_a_mask_fails_loudly(
    model: Any, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    kwargs = (await handed(model, prompt, lookup)).generate_kwargs()
    cache = kwargs["past_key_values"]
    with pytest.raises(RuntimeError, match="0 elements"):
        go_on(model, prompt[:, -1:], past_key_values=cache)


@pytest.mark.parametrize("kind", ["gqa", "sliding", "alternating"])
async def test_a_padded_batch_is_cut_at_its_end(
    kind: str,
    model_of: Model,
    lookup: KVLookupBuffer,
    padded: tuple[torch.Tensor, torch.Tensor],
    reference: Tokens,
) -> None:
    model, (ids, mask) = model_of(kind), padded
    await prefill(model, ids, lookup, attention_mask=mask, carry=())
    handoff = handoff_of(model, await lookup.drop_select(), ids, attention_mask=mask)
    kwargs: Any = handoff.generate_kwargs()
    assert torch.equal(kwargs["attention_mask"], mask)
    done = go_on(model, **kwargs | {"ids": kwargs.pop("input_ids")})
    assert torch.equal(done, reference(model, ids, mask))


@pytest.mark.parametrize("kind", ["sliding", "alternating"])
async def test_a_window_is_wrong_unless_its_length_is_counted_on(
    kind: str,
    model_of: Model,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    reference: Tokens,
) -> None:
    model: Any = model_of(kind)
    first = reference(model, prompt)[:, :41]
    naive = DynamicCache(list(filled(model, prompt)), config=model.config)
    layer: Any = naive.layers[-1]
    assert layer.cumulative_length == 15
    options = {"attention_mask": torch.ones_like(first), "max_new_tokens": 7}
    try:
        wrong = go_on(model, first, past_key_values=naive, **options)
    except (RuntimeError, IndexError):
        wrong = first
    assert not torch.equal(wrong, reference(model, prompt))
    handoff = await handed(model, prompt, lookup)
    kwargs: Any = handoff.generate_kwargs(await handoff.first_token())
    layer = kwargs["past_key_values"].layers[-1]
    assert (layer.cumulative_length, layer.keys.shape[-2]) == (40, 15)
    check_goes_on(model, reference(model, prompt), kwargs, 7)


async def test_without_the_config_a_window_sees_too_much(
    model_of: Model, lookup: KVLookupBuffer, prompt: torch.Tensor, reference: Tokens
) -> None:
    model: Any = model_of("sliding")
    naive = DynamicCache([(keys, values) for keys, values, _ in filled(model, prompt)])
    first = reference(model, prompt)[:, :41]
    try:
        wrong = go_on(
            model,
            first,
            past_key_values=naive,
            attention_mask=torch.ones_like(first),
            max_new_tokens=7,
        )
    except (RuntimeError, IndexError):
        wrong = first
    assert not torch.equal(wrong, reference(model, prompt))
    kwargs: Any = (await handed(model, prompt, lookup)).generate_kwargs()
    check_goes_on(model, reference(model, prompt), kwargs)


async def test_a_first_token_of_another_prompt_is_not_taken(
    model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    for held, asked in ((30, 40), (40, 30)):
        part = prompt[:, :held]
        await prefill(model, part, lookup, carry={"first_token", "hidden"})
        entry = await lookup.drop_select(prompt[0])
        handoff = handoff_of(model, entry, prompt[:, :asked])
        assert await handoff.first_token() is None
        assert await handoff.hidden() is None
        with pytest.raises(ValueError, match="not for this prompt"):
            handoff.generate_kwargs(torch.tensor([5]))


async def test_a_handoff_is_continued_from_once(
    model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    handoff = await handed(model, prompt, lookup)
    handoff.generate_kwargs()
    with pytest.raises(RuntimeError, match="once"):
        handoff.generate_kwargs()


async def test_a_prompt_of_one_token_imports_nothing(
    model: Any, lookup: KVLookupBuffer, prompt: torch.Tensor, reference: Tokens
) -> None:
    one = prompt[:, :1]
    kwargs: Any = (await handed(model, one, lookup)).generate_kwargs()
    check_goes_on(model, reference(model, one), kwargs)


async def test_all_that_was_carried_is_there(
    model: PreTrainedModel, prompt: torch.Tensor, lookup: KVLookupBuffer
) -> None:
    await prefill(model, prompt, lookup, carry={"hidden"})
    handoff = handoff_of(model, await lookup.drop_select(prompt[0]))
    logits, first = await handoff.logits(), await handoff.first_token()
    assert logits is not None
    assert first is not None
    assert torch.equal(logits.argmax(-1), first)
    bare = handoff_of(model, entry_of(model, filled(model, prompt), prompt))
    assert await bare.first_token() is None


@pytest.mark.parametrize("kind", ["gqa", "shared"])
async def test_it_is_told_when_a_forward_has_taken_up_every_layer(
    model_of: Model, lookup: KVLookupBuffer, prompt: torch.Tensor, kind: str
) -> None:
    handoff = await handed(model_of(kind), prompt, lookup)
    await handoff.landed()
    assert not handoff.taken_up.done()
    await continue_from(handoff, use_carried=False, max_new_tokens=1)
    assert handoff.taken_up.done()


async def test_who_waits_for_all_of_it_hears_what_kept_it_from_coming(
    model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    handoff = await handed(model, prompt, lookup)
    handoff.landing.fail(EntryAborted("it is gone", reason="producer"))
    with pytest.raises(EntryAborted, match="gone"):
        await handoff.landed()


TENSOR = torch.arange(3)


@pytest.fixture
async def landing() -> ReceivedTensors:  # it belongs to the test's loop
    return ReceivedTensors()


def taking(landing: ReceivedTensors) -> Forward[torch.Tensor]:
    return Forward(lambda: landing.take("a"), landing.stop, name="a forward")


async def test_a_thread_waits_until_the_tensor_has_landed(
    landing: ReceivedTensors,
) -> None:
    forward = taking(landing)
    landing.land("b", TENSOR)
    assert forward.thread.is_alive()
    landing.land("a", TENSOR)
    assert await forward.wait() is TENSOR
    await forward.aclose()


async def test_a_waiting_thread_wakes_up_when_nothing_will_land(
    landing: ReceivedTensors,
) -> None:
    forward = taking(landing)
    landing.fail(KeyError("gone"))
    landing.fail(ValueError("later"))
    with pytest.raises(KeyError, match="gone"):
        await forward.wait()


async def test_what_has_landed_is_there_after_a_failure_but_not_after_a_stop(
    landing: ReceivedTensors,
) -> None:
    for name in "ab":
        landing.land(name, TENSOR)
    landing.fail(KeyError("gone"))
    assert landing.take("a") is TENSOR
    landing.stop()
    with pytest.raises(ForwardStopped):
        landing.take("b")


async def test_a_waiting_thread_wakes_up_when_it_is_stopped(
    landing: ReceivedTensors,
) -> None:
    forward = taking(landing)
    await forward.aclose()
    with pytest.raises(ForwardStopped):
        forward.result()


async def test_the_loop_is_never_blocked() -> None:
    with pytest.raises(RuntimeError, match="would block the event loop"):
        ReceivedTensors().take("a")


@pytest.fixture
def used() -> list[int]:
    """Which layers a forward has taken up."""
    return []


@pytest.fixture
def cache(model_of: Model, landing: ReceivedTensors, used: list[int]) -> Any:
    plans = plan_layers(model_of("mixed").config)
    return ReceivingCache(
        landing,
        plans,
        length=39,
        entry_length=40,
        carried_rows=[plan.rows_to_carry(40) for plan in plans],
        device=torch.device("cpu"),
        used=used.append,
    )


def land(
    landing: ReceivedTensors, layer: int, key: torch.Tensor, value: torch.Tensor
) -> None:
    landing.land(f"layers.{layer}.value", value)
    landing.land(f"layers.{layer}.key", key)


async def test_lengths_and_masks_are_known_before_anything_has_landed(
    cache: Any,
) -> None:
    assert cache.get_seq_length() == 39
    assert cache.get_mask_sizes(1, 0) == (40, 0)
    assert cache.get_mask_sizes(1, 1) == (16, 24)
    assert cache.is_sliding == [False, True, True]


async def test_no_path_to_keys_or_values_goes_around_the_wait(
    cache: Any,
) -> None:
    step = torch.ones(1, 2, 1, 8)
    for read in (
        lambda: cache.layers[0].keys,
        lambda: cache.layers[1].values,
        lambda: list(cache),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.update(step, step, 2),
    ):
        with pytest.raises(RuntimeError, match="would block"):
            read()


async def test_a_layer_takes_the_positions_before_the_next_one(
    cache: Any, landing: ReceivedTensors, used: list[int]
) -> None:
    full = torch.arange(40.0).reshape(1, 1, 40, 1).expand(1, 2, 40, 8)
    for layer, rows in ((0, full), (1, full[:, :, -16:])):
        land(landing, layer, rows, rows)
    assert cache.layers[0].keys[0, 0, :, 0].tolist() == list(range(39))
    assert cache.layers[1].values[0, 0, :, 0].tolist() == list(range(24, 39))
    assert used == [0, 1]


async def test_keys_are_keys_values_are_values_and_positions_are_counted_once(
    cache: Any, landing: ReceivedTensors
) -> None:
    step = torch.ones(1, 2, 5, 8)
    for layer, rows in ((0, 40), (1, 16)):
        key = torch.full((1, 2, rows, 8), 1.0)
        land(landing, layer, key, 2 * key)
        assert cache.layers[layer].keys.eq(1).all()
        assert cache.layers[layer].values.eq(2).all()
        cache.update(step, step, layer)
    assert cache.positions_computed == 5


async def test_the_call_runs_in_a_thread_of_its_own() -> None:
    forward = Forward(threading.get_ident, lambda: None, name="a forward")
    assert await forward.wait() == forward.thread.ident != threading.get_ident()
    assert forward.thread.name == "a forward"
    await forward.aclose()


async def test_what_the_call_raises_is_raised_to_who_waits() -> None:
    def fail() -> None:
        raise KeyError("layer")

    with pytest.raises(KeyError, match="layer"):
        await Forward(fail, lambda: None, name="a forward").wait()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_closing_stops_the_call_and_waits_for_it_whoever_cancels(
    is_cancelled: bool,
) -> None:
    stopped = threading.Event()
    forward = Forward(lambda: stopped.wait(10), stopped.set, name="a forward")
    with anyio.CancelScope() as scope:
        if is_cancelled:
            scope.cancel()
        await forward.aclose()
    assert forward.ended.done()
    assert forward.result() is True


async def test_closing_does_not_wait_longer_than_a_second() -> None:
    ended = threading.Event()
    forward = Forward(lambda: ended.wait(10), lambda: None, name="a forward")
    async with asyncio.timeout(5):
        await forward.aclose()
    assert not forward.ended.done()
    ended.set()
    assert await forward.wait() is True


async def test_a_cancelled_wait_leaves_the_call_running() -> None:
    ended = threading.Event()
    forward = Forward(lambda: ended.wait(10), ended.set, name="a forward")
    with anyio.move_on_after(0) as scope:
        await forward.wait()
    assert scope.cancelled_caught
    assert not forward.ended.done()
    await forward.aclose()
