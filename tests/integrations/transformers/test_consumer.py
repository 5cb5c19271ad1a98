from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from asynckv.abc import InsertWriter, KVEntry, KVLookupBuffer
from asynckv.errors import EntryAborted, IncompatiblePeer
from asynckv.integrations.transformers import (
    LayerEvent,
    consumer,
    continue_from,
    entry_of,
    handoff_of,
    load,
    plan_layers,
    prefill,
)
from asynckv.integrations.transformers.consumer import tensors_of
from asynckv.integrations.transformers.forward import ForwardStopped
from asynckv.testing import use_across_tasks
from asynckv.testing.blocked import until_blocked

Model = Callable[..., PreTrainedModel]
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


async def insert(lookup: KVLookupBuffer, entry: KVEntry, **changes: Any) -> None:
    entry = msgspec.structs.replace(entry, **changes)
    await lookup.insert(*entry, extras=entry.extras)


@pytest.fixture
def entry(model: Any, prompt: torch.Tensor) -> KVEntry:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    return entry_of(model, cache, prompt)


def begun(
    lookup: KVLookupBuffer, model: PreTrainedModel, prompt: torch.Tensor
) -> AbstractAsyncContextManager[InsertWriter]:
    """Begin an entry, of which nothing comes."""
    specs = {
        spec: found
        for plan in plan_layers(model.config)
        for spec, found in plan.specs(1, 40, model.dtype).items()
    }
    return lookup.open_insert(prompt[0], None, specs)


async def test_leaving_acknowledges_and_landed_layers_stay(
    model: PreTrainedModel,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    reference: Callable[..., torch.Tensor],
) -> None:
    prefilled = await prefill(model, prompt, lookup)
    async with load(model, prompt, lookup) as handoff:
        await handoff.landed()
    await lookup.taken(prefilled.entry_id)
    done = await continue_from(handoff, use_carried=False, **GREEDY)
    assert torch.equal(done.sequences, reference(model, prompt))
    assert done.entry_id == prefilled.entry_id
    with pytest.raises(RuntimeError, match="was left"):
        await handoff.first_token()


async def test_the_layers_are_planned_once_a_call(
    model: PreTrainedModel,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    planning_threads: list[str],
) -> None:
    await prefill(model, prompt, lookup)
    assert len(planning_threads) == 1
    async with load(model, prompt, lookup) as handoff:
        assert len(planning_threads) == 2
        await handoff.landed()
    await prefill(model, prompt, lookup)
    entry = await lookup.drop_select(prompt[0])
    planning_threads.clear()
    handoff_of(model, entry, prompt).generate_kwargs()
    assert len(planning_threads) == 1


async def test_the_loop_is_given_back_between_tensors_that_are_here(
    model: PreTrainedModel,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def count() -> None:
        while True:
            ticks.append(None)
            await asyncio.sleep(0)

    ticks: list[None] = []
    landed: list[int] = []
    monkeypatch.setattr(consumer, "_TENSORS_A_TICK", 2)
    await prefill(model, prompt, lookup)
    counting = asyncio.create_task(count())
    note = lambda event: landed.append(len(ticks))  # noqa: E731
    async with load(model, prompt, lookup, observe=note) as handoff:
        await handoff.landed()
    counting.cancel()
    assert len(set(landed)) > 1


async def test_an_error_gives_the_entry_back(
    model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    await prefill(model, prompt, lookup)
    with pytest.raises(InterruptedError):
        async with load(model, prompt, lookup):
            raise InterruptedError
    async with load(model, prompt, lookup) as handoff:
        assert handoff.attempt == 2


async def test_it_may_be_entered_and_left_in_different_tasks(
    model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    await prefill(model, prompt, lookup)
    await use_across_tasks(
        load(model, prompt, lookup), lambda handoff: continue_from(handoff, **GREEDY)
    )
    assert await lookup.peek(prompt[0]) == 0


async def test_what_has_not_landed_when_it_is_left_never_will(
    model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    await prefill(model, prompt, lookup)
    async with load(model, prompt, lookup) as handoff:
        pass
    with pytest.raises(RuntimeError, match="before it had landed"):
        await continue_from(handoff, **GREEDY, use_carried=False)


@pytest.mark.parametrize("by_an_error", [True, False])
async def test_who_waits_for_all_of_it_hears_that_the_load_was_left(
    model: PreTrainedModel,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    by_an_error: bool,
) -> None:
    with contextlib.suppress(InterruptedError):
        async with begun(lookup, model, prompt):
            async with load(model, prompt, lookup) as handoff:
                waiting = asyncio.create_task(handoff.landed())
                await until_blocked(waiting)
                if by_an_error:
                    raise InterruptedError
            raise InterruptedError  # the producer's, too late to count
    with pytest.raises(RuntimeError, match="before it had landed"):
        await waiting
    with pytest.raises(RuntimeError, match="before it had landed"):
        await handoff.landed()


async def test_every_layer_lands_and_is_used(
    model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    events: list[LayerEvent] = []
    await prefill(model, prompt, lookup)
    async with load(model, prompt, lookup, observe=events.append) as handoff:
        await continue_from(handoff, **GREEDY)
    for what in ("landed", "used"):
        assert {event.layer for event in events if event.what == what} == {0, 1, 2}


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (lambda of: of("full"), "model"),
        (lambda of: of("sliding"), "model"),
        (lambda of: of("gqa", torch.bfloat16), "dtype"),
    ],
)
async def test_another_models_kv_is_refused_and_given_back(
    other: Callable[[Model], PreTrainedModel],
    field: str,
    model_of: Model,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
) -> None:
    await prefill(model_of("gqa"), prompt, lookup)
    with pytest.raises(IncompatiblePeer, match="another model") as caught:
        async with load(other(model_of), prompt, lookup):
            raise AssertionError("entered")
    assert caught.value.field == field
    assert await lookup.peek(prompt[0]) == 40


async def test_other_weights_are_told_apart_by_name(
    model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    await prefill(model, prompt, lookup, name="mine")
    with pytest.raises(IncompatiblePeer, match="mine"):
        async with load(model, prompt, lookup, name="yours"):
            raise AssertionError("entered")
    async with load(model, prompt, lookup, name="mine"):
        pass


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda kv: {"layers.0": kv["layers.0"]}, "layers"),
        (lambda kv: {name: t.bfloat16() for name, t in kv.items()}, "dtype"),
        (lambda kv: {name: t[..., :4] for name, t in kv.items()}, "shape"),
        (lambda kv: {name: t[:, :, 1:] for name, t in kv.items()}, "shape"),
        (lambda kv: {name: t[:, :, :0] for name, t in kv.items()}, "shape"),
        (lambda kv: {name: t[0] for name, t in kv.items()}, "layers"),
    ],
)
async def test_an_entry_without_a_fingerprint_is_checked_by_its_shapes(
    change: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    field: str,
    model: PreTrainedModel,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    entry: KVEntry,
) -> None:
    key: Any = entry.key
    await insert(lookup, entry, key=change(key), extras={})
    with pytest.raises(IncompatiblePeer) as caught:
        async with load(model, prompt, lookup):
            raise AssertionError("entered")
    assert caught.value.field == field


async def test_an_entry_of_no_prompt_is_refused(
    model: PreTrainedModel, lookup: KVLookupBuffer, entry: KVEntry
) -> None:
    for tokens in (None, torch.tensor([-3, 1])):
        await insert(lookup, entry, input_tokens=tokens)
        with pytest.raises(IncompatiblePeer) as caught:
            async with load(model, None, lookup):
                raise AssertionError("entered")
        assert caught.value.field == "tokens"
        await lookup.drop_select()


def test_an_entry_for_another_prompt_is_refused(
    model: PreTrainedModel, entry: KVEntry
) -> None:
    async def check() -> None:
        with pytest.raises(IncompatiblePeer, match="another prompt"):
            handoff_of(model, entry, [5, 5, 5])

    asyncio.run(check())


async def test_a_cancelled_wait_for_a_match_leaves_nothing(
    model: LlamaForCausalLM, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    loading = load(model, prompt, lookup)
    task = asyncio.create_task(loading.__aenter__())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await prefill(model, prompt, lookup)
    assert await lookup.peek(prompt[0]) == 40


@pytest.mark.parametrize("by_an_error", [True, False])
async def test_only_leaving_by_an_error_stops_a_forward(
    model: Any, lookup: KVLookupBuffer, prompt: torch.Tensor, by_an_error: bool
) -> None:
    await prefill(model, prompt, lookup)
    with contextlib.suppress(InterruptedError):
        async with load(model, prompt, lookup) as handoff:
            await handoff.landed()
            if by_an_error:
                raise InterruptedError
    cache = handoff.generate_kwargs()["past_key_values"]
    step = torch.ones(1, 2, 1, 8)
    expected = ForwardStopped if by_an_error else None
    with pytest.raises(expected) if expected else contextlib.nullcontext():
        cache.update(step, step, 0)


async def test_the_hidden_state_travels_with_an_entry_in_one_piece(
    model: PreTrainedModel, entry: KVEntry
) -> None:
    hidden = torch.ones(1, 1, 32)
    carried = msgspec.structs.replace(entry, hidden=hidden)
    assert tensors_of(carried)["hidden"] is hidden


async def test_a_layer_that_cannot_come_fails_who_waits_for_it(
    model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    inserting = begun(lookup, model, prompt)
    await inserting.__aenter__()
    with pytest.raises(EntryAborted):
        async with load(model, prompt, lookup) as handoff:
            failure = ValueError("the producer fails")
            await inserting.__aexit__(ValueError, failure, None)
            with pytest.raises(EntryAborted):
                await handoff.landed()
            await continue_from(handoff, use_carried=False, **GREEDY)


def test_an_event_is_now_unless_told_otherwise() -> None:
    before = time.monotonic()
    event = LayerEvent(3, "landed")
    assert before <= event.at <= time.monotonic()
    assert LayerEvent(3, "landed", at=1.0).at == 1.0
