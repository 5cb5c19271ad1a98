from __future__ import annotations

from typing import Any

import pytest
import torch

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
