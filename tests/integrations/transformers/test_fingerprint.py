from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from asynckv.errors import IncompatiblePeer
from asynckv.integrations.transformers import fingerprint_of
from asynckv.integrations.transformers.fingerprint import (
    check_fingerprint,
    pack_fingerprint,
)
from asynckv.types import KVFingerprint

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}


def of(**changes: Any) -> KVFingerprint:
    return fingerprint_of(LlamaConfig(**BASE | changes))


def test_equal_configs_have_equal_fingerprints() -> None:
    assert of() == of()
    assert of().dtype == "bfloat16"
    assert of().layout == "HND full*4"
    assert "kv_heads=2*4 head_dim=8*4" in of().model


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": 5}, "model"),
        ({"num_key_value_heads": 4}, "model"),
        ({"num_attention_heads": 4}, "model"),
        ({"head_dim": 16}, "model"),
        ({"dtype": "float32"}, "dtype"),
        ({"sliding_window": 16}, "layout"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "details"),
    ],
)
def test_each_difference_is_named_by_its_field(
    changes: dict[str, Any], field: str
) -> None:
    assert of().difference(of(**changes)) == field


def test_name_and_tokenizer_are_part_of_it() -> None:
    config = LlamaConfig(**BASE)
    assert fingerprint_of(config, name="a").difference(of()) == "model"
    assert fingerprint_of(config, tokenizer="t").difference(of()) == "details"


def test_a_tokenizer_is_compared_by_its_vocabulary() -> None:
    class Tokenizer:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1}

    tokenizer: Any = Tokenizer()
    config = LlamaConfig(**BASE)
    first = fingerprint_of(config, tokenizer=tokenizer)
    assert first == fingerprint_of(config, tokenizer=tokenizer)
    assert first != fingerprint_of(config)


def test_the_model_knows_its_dtype(model_of: Callable[..., PreTrainedModel]) -> None:
    assert fingerprint_of(model_of("gqa", torch.bfloat16)).dtype == "bfloat16"
    with pytest.raises(ValueError, match="no dtype"):
        fingerprint_of(LlamaConfig())


def test_a_packed_fingerprint_is_checked_field_by_field() -> None:
    check_fingerprint(pack_fingerprint(of()), of())
    with pytest.raises(IncompatiblePeer, match="float32") as caught:
        check_fingerprint(pack_fingerprint(of()), of(dtype="float32"))
    assert caught.value.field == "dtype"


def test_what_is_no_fingerprint_is_an_incompatible_peer() -> None:
    with pytest.raises(IncompatiblePeer, match="cannot be read"):
        check_fingerprint(torch.zeros(3, dtype=torch.uint8), of())
