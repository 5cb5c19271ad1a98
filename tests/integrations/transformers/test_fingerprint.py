"""What tells one entry from another: its model, and its prompt."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import BatchEncoding, LlamaConfig, PreTrainedModel

from asynckv.abc import KVLookupBuffer
from asynckv.errors import ConfigError, IncompatiblePeer
from asynckv.integrations.transformers import fingerprint_of, load, prefill
from asynckv.integrations.transformers.fingerprint import (
    check_fingerprint,
    pack_fingerprint,
)
from asynckv.integrations.transformers.prompts import Prompt
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


def test_models_that_scale_by_their_longest_prompt_differ_by_how_long_that_is() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    short, long = (
        of(rope_parameters=rope, max_position_embeddings=most) for most in (64, 128)
    )
    assert short.difference(long) == "details"
    assert of(max_position_embeddings=64) == of(max_position_embeddings=128)


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


class ToyConfig:
    """As PEFT's: a set, and something that says where its file lay."""

    def __init__(self, *, rank: int, is_prompt_learning: bool) -> None:
        self.rank, self.is_prompt_learning = rank, is_prompt_learning

    def to_dict(self) -> dict[str, Any]:
        return {"r": self.rank, "on": {"q", "v"}, "revision": str(id(self))}


class ToyAdapter(torch.nn.Module):
    """What a layer of PEFT shows of itself."""

    adapter_layer_names = ("lora_A",)

    def __init__(self, fill: float) -> None:
        super().__init__()
        weights = {"one": torch.full((2, 3), fill), "two": torch.full((2, 3), 7.0)}
        self.lora_A = torch.nn.ParameterDict(weights)
        self.scaling = {"one": 0.5, "two": 0.5}
        self.active_adapters: Sequence[str] = ["one"]
        self.merged_adapters: Sequence[str] = []
        self.disable_adapters = False


AdaptedModel = Callable[..., Any]


@pytest.fixture
def adapted(model_of: Callable[..., PreTrainedModel]) -> AdaptedModel:
    """Make a model with an adapter of so many, or other, weights."""

    def adapted(fill: float = 1.0, rank: int = 8, *, adds: bool = False) -> Any:
        model: Any = copy.deepcopy(model_of("gqa"))
        config = ToyConfig(rank=rank, is_prompt_learning=adds)
        model.peft_config = {"one": config, "two": config}
        model.toy = ToyAdapter(fill)
        return model

    return adapted


def test_two_adapters_of_one_base_differ(adapted: AdaptedModel) -> None:
    ours = fingerprint_of(adapted())
    assert ours == fingerprint_of(adapted())
    assert "adapters=one:" in ours.details and "two" not in ours.details
    for other in (adapted(2.0), adapted(rank=16)):
        assert ours.difference(fingerprint_of(other)) == "details"


def test_an_adapter_counts_where_it_is_in_use(
    adapted: AdaptedModel, model_of: Callable[..., PreTrainedModel]
) -> None:
    model, base = adapted(), fingerprint_of(model_of("gqa"))
    first = fingerprint_of(model)
    model.toy.scaling["one"] = 0.25
    assert fingerprint_of(model) not in (first, base)
    model.toy.active_adapters = ["two"]
    assert "adapters=two:" in fingerprint_of(model).details
    model.toy.disable_adapters = True
    assert fingerprint_of(model) == base
    model.toy.merged_adapters = ["one"]
    assert "adapters=one:" in fingerprint_of(model).details


def test_an_adapter_that_adds_positions_is_refused(adapted: AdaptedModel) -> None:
    with pytest.raises(ConfigError, match="adds positions of its own"):
        fingerprint_of(adapted(adds=True))


async def test_kv_of_another_adapter_is_given_back(
    adapted: AdaptedModel, lookup: KVLookupBuffer, prompt: torch.Tensor
) -> None:
    await prefill(adapted(), prompt, lookup)
    with pytest.raises(IncompatiblePeer, match="adapters=one:"):
        async with load(adapted(2.0), prompt, lookup):
            pass
    async with load(adapted(), prompt, lookup) as handoff:
        await handoff.landed()


def test_the_dtype_that_is_given_comes_before_that_of_a_model_or_its_config(
    model_of: Callable[..., PreTrainedModel],
) -> None:
    model: Any = copy.copy(model_of("gqa", torch.bfloat16))
    model.config = copy.copy(model.config)
    model.config.dtype = "float64"
    assert fingerprint_of(model).dtype == "bfloat16"
    assert fingerprint_of(model, dtype=torch.float16).dtype == "float16"


IDS = torch.arange(1, 11).reshape(2, 5)
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def test_one_row_is_found_by_its_ids() -> None:
    prompt = Prompt.of([5, 6, 7])
    assert prompt.tokens.tolist() == [5, 6, 7]
    assert prompt.match == "prefix"


def test_a_batch_is_found_as_a_whole() -> None:
    prompt = Prompt.of(IDS, MASK)
    assert prompt.tokens.tolist() == [-2, -3, -1, *range(1, 11)]
    assert prompt.match == "exact"


def test_a_mask_of_ones_is_no_padding() -> None:
    prompt = Prompt.of(IDS[:1], torch.ones(1, 5))
    assert prompt.is_plain
    assert prompt.tokens.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("mask", [None, MASK])
def test_tokens_are_read_back(mask: torch.Tensor | None) -> None:
    back = Prompt.of_tokens(Prompt.of(IDS, mask).tokens)
    assert torch.equal(back.ids, IDS)
    assert back.padding == ((0, 0) if mask is None else (2, 0))
    assert torch.equal(
        back.attention_mask, torch.ones_like(IDS) if mask is None else MASK
    )


def test_batches_that_differ_in_padding_only_never_match() -> None:
    others = [
        Prompt.of(IDS),
        Prompt.of(IDS.reshape(1, 10)),
        Prompt.of(IDS.reshape(5, 2)),
    ]
    tokens = {tuple(prompt.tokens.tolist()) for prompt in others}
    assert tuple(Prompt.of(IDS, MASK).tokens.tolist()) not in tokens
    assert len(tokens) == 3
    assert all(Prompt.of(IDS, MASK).shared_length(other) == 0 for other in others)


def test_batches_of_different_lengths_share_nothing() -> None:
    longer = Prompt.of(IDS)
    assert Prompt.of(IDS[:, :3]).shared_length(longer) == 0
    assert longer.shared_length(Prompt.of(IDS)) == 5


def test_positions_are_counted_from_the_first_token_of_a_row() -> None:
    positions = Prompt.of(IDS, MASK).position_ids
    assert positions.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]


def test_the_shared_length_is_that_of_the_shorter_unless_they_differ() -> None:
    prompt = Prompt.of([1, 2, 3, 4])
    assert prompt.shared_length(Prompt.of([1, 2])) == 2
    assert prompt.shared_length(Prompt.of([1, 2, 3, 4, 5])) == 4
    assert prompt.shared_length(Prompt.of([1, 3])) == 0


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ("why is the sky blue?", r"tokenizer's \['input_ids'\], and not a str"),
        (BatchEncoding({"input_ids": IDS}), r"and not a BatchEncoding"),
        ([1.5, 2.0], "whole numbers, not torch.float32"),
    ],
)
def test_what_is_no_token_ids_is_refused_in_words(ids: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Prompt.of(ids)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([], None, "no prompt"),
        (torch.zeros(1, 2, 3), None, "no prompt"),
        ([1, -1], None, "never negative"),
        (IDS, MASK[:1], "attention_mask"),
        (IDS, MASK.flip(1), "left padding"),
        (IDS, torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]]), "left padding"),
        (IDS, torch.tensor([[0] * 5, [1] * 5]), "no tokens"),
    ],
)
def test_what_is_no_prompt_is_refused(
    ids: torch.Tensor, mask: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Prompt.of(ids, mask)


@pytest.mark.parametrize("tokens", [[], [-2, -1, -1, 1], [-2, -1, -1], [-1, -3, 1, 2]])
def test_tokens_of_no_prompt_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match=r"prompt|batch|row"):
        Prompt.of_tokens(torch.tensor(tokens, dtype=torch.int64))


@pytest.mark.parametrize("tokens", [[-2, -1, -1], [-2, -1, -1, 5]])
def test_a_batch_without_tokens_for_each_row_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="no batch of 2 rows"):
        Prompt.of_tokens(torch.tensor(tokens))
