from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from asynckv.abc import KVLookupBuffer
from asynckv.errors import ConfigError, EntryAborted, EntryTooLarge
from asynckv.integrations.transformers import (
    LayerEvent,
    LayerPlan,
    Prefilled,
    StreamingCache,
    prefill,
)
from asynckv.integrations.transformers.forward import ForwardStopped
from asynckv.integrations.transformers.producer import _stays_on_gpu
from asynckv.testing import sweep_cancellation
from harness.fake_devices import faultless_gpus
from harness.gpu_pairs import open_gpu_pair

Model = Callable[..., PreTrainedModel]


class Gate:
    """Holds the forward up before the last layer, in its own thread."""

    def __init__(self, model: Any) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._hook = model.model.layers[-1].register_forward_pre_hook(self._hold)

    def _hold(self, *_: object) -> None:
        self.reached.set()
        self.opened.wait(10)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.set()
        self._hook.remove()


async def test_layers_leave_from_inside_the_forward(
    model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    sent = asyncio.Event()

    def observe(event: LayerEvent) -> None:
        if (event.layer, event.what) == (1, "sent"):
            sent.set()

    with Gate(model) as gate:
        running = asyncio.create_task(prefill(model, prompt, lookup, observe=observe))
        await sent.wait()  # the loop is free while the forward is held up
        gate.opened.set()
        await running


async def test_a_prompt_whose_kv_is_of_no_use_to_others_is_not_computed(
    model_of: Model, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    events: list[LayerEvent] = []
    with pytest.raises(ConfigError, match="dynamic.*one here has 40"):
        await prefill(model_of("dynamic"), prompt, lookup, observe=events.append)
    assert not events


async def test_events_come_in_order_for_every_layer(
    model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    events: list[LayerEvent] = []
    prefilled = await prefill(model, prompt, lookup, observe=events.append)
    for what in ("computed", "sent"):
        assert [e.layer for e in events if e.what == what] == [0, 1, 2]
    assert all(e.at <= prefilled.computed_at for e in events if e.what == "computed")


@pytest.mark.parametrize("kind", ["gqa", "sliding", "shared"])
async def test_the_entry_is_what_the_forward_computed(
    kind: str, model_of: Model, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    model: Any = model_of(kind)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        logits = model(prompt, past_key_values=cache).logits[:, -1]
    await prefill(model, prompt, lookup, carry=("first_token", "logits", "hidden"))
    entry = await lookup.drop_select(prompt[0])
    assert isinstance(entry.key, dict)
    for name, keys in entry.key.items():
        states: Any = cache.layers[int(name.split(".")[1])]
        assert torch.equal(keys[:, :, -15:], states.keys[:, :, -15:])
    assert entry.extras["first_token"].tolist() == logits.argmax(-1).tolist()
    assert torch.allclose(entry.extras["logits"], logits, atol=1e-5)
    assert entry.hidden is not None
    assert entry.hidden.shape == (1, 1, 32)


@pytest.mark.parametrize(
    ("carry", "error", "words"),
    [
        ("logits", TypeError, "a collection of names, not 'logits': write {"),
        (None, TypeError, "a collection of names, not None: write {"),
        (["logit"], ValueError, r"first_token, logits, hidden, not \['logit'\]"),
    ],
)
async def test_what_cannot_be_carried_is_refused_with_what_can(
    carry: Any,
    error: type[Exception],
    words: str,
    model: PreTrainedModel,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
) -> None:
    with pytest.raises(error, match=words):
        await prefill(model, prompt, lookup, carry=carry)
    assert await lookup.peek(prompt[0]) == 0


async def test_a_model_that_shows_its_hidden_states_carries_what_was_asked_for(
    model: PreTrainedModel,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model.config, "output_hidden_states", True)
    assert (await prefill(model, prompt, lookup)).carried.hidden is None


async def test_a_prefill_computes_the_logits_of_no_position_but_the_last(
    model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    shapes: list[torch.Size] = []
    hook = model.register_forward_hook(
        lambda module, args, output: shapes.append(output.logits.shape)
    )
    await prefill(model, prompt, lookup)
    hook.remove()
    assert shapes == [(1, 1, 128)]


async def test_the_producer_may_go_on_with_its_own_cache(
    model: PreTrainedModel,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    reference: Callable[..., torch.Tensor],
) -> None:
    prefilled = await prefill(model, prompt, lookup)
    assert prefilled.carried.first_token is not None
    ids = torch.cat([prompt, prefilled.carried.first_token.reshape(1, 1)], dim=1)
    generate: Any = model.generate
    done = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=prefilled.cache,
        max_new_tokens=7,
        do_sample=False,
    )
    assert torch.equal(done, reference(model, prompt))


async def test_a_forward_that_counts_padding_is_not_what_generate_does(
    model: Any, lookup: KVLookupBuffer, padded: tuple[torch.Tensor, torch.Tensor]
) -> None:
    ids, mask = padded
    naive = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=naive)
    prefilled = await prefill(model, ids, lookup, attention_mask=mask)
    ours: Any = prefilled.cache.layers[0]
    theirs: Any = naive.layers[0]
    assert torch.allclose(ours.keys[1], theirs.keys[1], atol=1e-5)
    assert not torch.allclose(ours.keys[0, :, 7:], theirs.keys[0, :, 7:], atol=1e-2)


async def test_a_prefill_that_can_never_fit_runs_no_forward(
    model: PreTrainedModel, lookup: KVLookupBuffer
) -> None:
    with Gate(model) as gate, pytest.raises(EntryTooLarge):
        await prefill(model, [5] * 400_000, lookup)
    assert not gate.reached.is_set()


async def test_what_the_forward_raises_aborts_the_entry(
    model: Any, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("layer 1")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(MemoryError, match="layer 1"):
            await prefill(model, prompt, lookup, entry_id="failed")
    finally:
        hook.remove()
    with pytest.raises(EntryAborted):
        await lookup.taken("failed")
    assert await lookup.peek(prompt[0]) == 0


async def test_a_layer_that_is_not_what_the_config_says_is_named(
    model: Any, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    attention = model.model.layers[1].self_attn
    projection = attention.k_proj
    attention.k_proj = torch.nn.Linear(32, 32)
    try:
        with pytest.raises(ConfigError, match="layer 1 computed"):
            await prefill(model, prompt, lookup)
    finally:
        attention.k_proj = projection


async def test_a_layer_that_never_uses_the_cache_is_named(
    model: Any, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    layers = model.model.layers
    model.model.layers = layers[:2]
    try:
        with pytest.raises(ConfigError, match="layer 2 never used the cache"):
            await prefill(model, prompt, lookup)
    finally:
        model.model.layers = layers


async def test_a_cancelled_prefill_stops_at_the_next_layer_and_leaves_no_entry(
    model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    seen, is_held_up = set[int](), asyncio.Event()

    def observe(event: LayerEvent) -> None:
        seen.add(event.layer)
        if event.layer == 1:
            is_held_up.set()

    with Gate(model) as gate:
        running = asyncio.create_task(prefill(model, prompt, lookup, observe=observe))
        await is_held_up.wait()
        running.cancel()
        asyncio.get_running_loop().call_soon(gate.opened.set)
        with pytest.raises(asyncio.CancelledError):
            await running
    assert seen == {0, 1}
    assert await lookup.peek(prompt[0]) == 0


async def test_a_prefill_cancelled_anywhere_leaves_nothing(
    model: PreTrainedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    ids = prompt.repeat(1, 30)  # large enough for puts to wait

    async def run() -> Prefilled:
        return await prefill(model, ids, lookup)

    async def check(_: int, __: object, outcome: Any) -> None:
        assert (await lookup.peek(ids[0]) == 0) is outcome.cancelled
        if not outcome.cancelled:
            await lookup.drop_select(ids[0])

    counts = await sweep_cancellation(run, check)
    assert counts.cancelled > 10


@pytest.mark.parametrize(("url", "stays"), [("", True), ("?payload=inline", False)])
async def test_layers_stay_on_the_gpu_where_they_go_on_from_there(
    url: str, stays: bool
) -> None:
    with faultless_gpus() as gpus:
        async with open_gpu_pair(gpus, url=url) as pair:
            for number, is_there in enumerate((stays, False)):
                model: Any = SimpleNamespace(device=torch.device("cuda", number))
                assert _stays_on_gpu(model, pair.peer.lookup) is is_there


def test_a_stopped_cache_ends_the_forward(model: Any, prompt: torch.Tensor) -> None:
    cache = StreamingCache(model, lambda plan, keys, values: cache.stop())
    with pytest.raises(ForwardStopped):
        model(prompt, past_key_values=cache)


def test_a_layer_is_handed_over_once(model: Any, prompt: torch.Tensor) -> None:
    plans: list[LayerPlan] = []
    cache = StreamingCache(model, lambda plan, keys, values: plans.append(plan))
    with torch.no_grad():
        model(prompt, past_key_values=cache)
        model(prompt[:, :1], past_key_values=cache)
    assert [plan.index for plan in plans] == [0, 1, 2]


@pytest.mark.parametrize("options", [{}, {"stays_on_gpu": True}])
def test_what_travels_is_in_host_memory_unless_it_is_to_stay(
    model: Any, options: dict[str, Any]
) -> None:
    came: list[torch.Tensor] = []
    cache: Any = StreamingCache(
        model, lambda plan, keys, values: came.append(keys), **options
    )
    there = torch.ones(1, 2, 3, 8, device="meta")
    if options:
        cache.update(there, there, 0)
        assert came[0].device.type == "meta"
    else:
        with pytest.raises(NotImplementedError):  # there are no bytes to be copied
            cache.update(there, there, 0)


def test_keys_are_handed_over_as_keys(model: Any) -> None:
    came: list[torch.Tensor] = []
    cache = StreamingCache(model, lambda plan, *states: came.extend(states))
    cache.update(torch.ones(1, 2, 4, 8), torch.zeros(1, 2, 4, 8), 0)
    assert came[0].eq(1).all() and came[1].eq(0).all()


def test_what_a_layer_computes_is_compared_with_its_config(model: Any) -> None:
    cache = StreamingCache(model, lambda plan, keys, values: None)
    for heads, batch in ((3, 1), (3, 2)):
        wrong = torch.ones(batch, heads, 4, 8)
        with pytest.raises(ConfigError, match="its config says"):
            StreamingCache(model, lambda *_: None).update(wrong, wrong, 0)
    right = torch.ones(2, 2, 4, 8)
    keys, _ = cache.update(right, right, 0)
    assert torch.equal(keys, right)
