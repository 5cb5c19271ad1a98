from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModel, LlamaConfig, PreTrainedModel

from asynckv.errors import ConfigError
from asynckv.integrations.transformers import Carried
from asynckv.integrations.transformers.entries import DEFAULT_CARRY
from asynckv.types import TensorSpec

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
