from __future__ import annotations

from typing import Any

import pytest
import torch

from asynckv.errors import ConfigError
from asynckv.integrations.transformers import LayerPlan, StreamingCache
from asynckv.integrations.transformers.forward import ForwardStopped


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
