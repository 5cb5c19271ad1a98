from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from asynckv.integrations.transformers import LandingCache, plan_layers
from asynckv.integrations.transformers.forward import Forward, ForwardStopped
from asynckv.integrations.transformers.handoff import Landing

TENSOR = torch.arange(3)


async def test_a_thread_waits_until_the_tensor_has_landed() -> None:
    landing = Landing()
    forward = Forward(lambda: landing.take("a"), landing.stop, name="a forward")
    landing.land("b", TENSOR)
    assert forward.thread.is_alive()
    landing.land("a", TENSOR)
    assert await forward.wait() is TENSOR
    await forward.aclose()


async def test_a_waiting_thread_wakes_up_when_nothing_will_land() -> None:
    landing = Landing()
    forward = Forward(lambda: landing.take("a"), landing.stop, name="a forward")
    landing.fail(KeyError("gone"))
    landing.fail(ValueError("later"))
    with pytest.raises(KeyError, match="gone"):
        await forward.wait()


async def test_what_has_landed_is_there_after_a_failure_but_not_after_a_stop() -> None:
    landing = Landing()
    landing.land("a", TENSOR)
    landing.land("b", TENSOR)
    landing.fail(KeyError("gone"))
    assert landing.take("a") is TENSOR
    landing.stop()
    with pytest.raises(ForwardStopped):
        landing.take("b")


async def test_a_waiting_thread_wakes_up_when_it_is_stopped() -> None:
    landing = Landing()
    forward = Forward(lambda: landing.take("a"), landing.stop, name="a forward")
    await forward.aclose()
    with pytest.raises(ForwardStopped):
        forward.result()


async def test_the_loop_is_never_blocked() -> None:
    with pytest.raises(RuntimeError, match="would block the event loop"):
        Landing().take("a")


def cache_of(
    model: PreTrainedModel, landing: Landing, used: Callable[[int], None]
) -> LandingCache:
    plans = plan_layers(model.config)
    return LandingCache(
        landing,
        plans,
        length=39,
        entry_length=40,
        carried_rows=[plan.rows_to_carry(40) for plan in plans],
        device=torch.device("cpu"),
        used=used,
    )


async def test_lengths_and_masks_are_known_before_anything_has_landed(
    model_of: Callable[..., PreTrainedModel],
) -> None:
    cache = cache_of(model_of("mixed"), Landing(), lambda _: None)
    assert cache.get_seq_length() == 39
    assert cache.get_mask_sizes(1, 0) == (40, 0)
    assert cache.get_mask_sizes(1, 1) == (16, 24)
    assert cache.is_sliding == [False, True, True]


async def test_no_path_to_keys_or_values_goes_around_the_wait(
    model_of: Callable[..., PreTrainedModel],
) -> None:
    cache: Any = cache_of(model_of("mixed"), Landing(), lambda _: None)
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
    model_of: Callable[..., PreTrainedModel],
) -> None:
    landing, used = Landing(), list[int]()
    cache: Any = cache_of(model_of("mixed"), landing, used.append)
    full = torch.arange(40.0).reshape(1, 1, 40, 1).expand(1, 2, 40, 8)
    for layer, rows in ((0, full), (1, full[:, :, -16:])):
        landing.land(f"layers.{layer}.key", rows)
        landing.land(f"layers.{layer}.value", rows)
    assert cache.layers[0].keys[0, 0, :, 0].tolist() == list(range(39))
    assert cache.layers[1].values[0, 0, :, 0].tolist() == list(range(24, 39))
    assert used == [0, 1]
    assert threading.active_count() >= 1


async def test_keys_are_keys_and_values_are_values(
    model_of: Callable[..., PreTrainedModel],
) -> None:
    landing = Landing()
    cache: Any = cache_of(model_of("mixed"), landing, lambda _: None)
    for layer, rows in ((0, 40), (1, 16)):
        landing.land(f"layers.{layer}.value", torch.full((1, 2, rows, 8), 2.0))
        landing.land(f"layers.{layer}.key", torch.full((1, 2, rows, 8), 1.0))
    for layer in cache.layers[:2]:
        assert layer.values.eq(2).all() and layer.keys.eq(1).all()


async def test_the_positions_that_a_forward_computes_are_counted_once(
    model_of: Callable[..., PreTrainedModel],
) -> None:
    landing = Landing()
    cache: Any = cache_of(model_of("mixed"), landing, lambda _: None)
    for layer, rows in ((0, 40), (1, 16)):
        for part in ("key", "value"):
            landing.land(f"layers.{layer}.{part}", torch.ones(1, 2, rows, 8))
        cache.update(torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 8), layer)
    assert cache.positions_computed == 5


async def test_what_landed_at_once_is_there_and_complete() -> None:
    landing = Landing()
    landing.land_all({"a": TENSOR, "b": TENSOR + 1})
    assert landing.completed.done()
    assert torch.equal(landing.take("b"), TENSOR + 1)
