from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy
import pytest
import torch

from asynckv.connectors.engine import (
    EntryHeader,
    keys_of_ranks,
    prefix_block_keys,
    prompt_digest,
    rank_block_keys,
    salt_digest,
)
from asynckv.errors import IncompatiblePeer
from asynckv.types import KVFingerprint, TensorSpec
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import toy_shape


def test_two_prompts_share_as_many_keys_as_whole_blocks() -> None:
    one = prefix_block_keys([*range(10), 128_000, 1], 4)
    two = prefix_block_keys([*range(10), 128_001, 1, 2], 4)
    assert len(one) == len(two) == 3
    assert one[:2] == two[:2]
    assert one[2] != two[2]


def test_a_key_stands_for_all_tokens_before_it() -> None:
    first = prefix_block_keys([1, 2, 3, 4], 2)
    other = prefix_block_keys([9, 2, 3, 4], 2)
    assert not set(first) & set(other)


def test_models_salts_and_block_sizes_have_keys_of_their_own() -> None:
    tokens = list(range(8))
    found = [
        prefix_block_keys(tokens, 4),
        prefix_block_keys(tokens, 4, KVFingerprint(model="m")),
        prefix_block_keys(tokens, 4, KVFingerprint(model="m"), "tenant"),
        prefix_block_keys(tokens, 8),
        prefix_block_keys(tokens, 4, None, "tenant"),
    ]
    assert len({key for keys in found for key in keys}) == sum(map(len, found))


def test_no_whole_block_has_no_key() -> None:
    assert prefix_block_keys([1, 2, 3], 4) == ()
    with pytest.raises(ValueError, match="block_size"):
        prefix_block_keys([1], 0)
    with pytest.raises(TypeError, match="block_size is a whole number"):
        prefix_block_keys([1], "16")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tokens",
    [
        *([1.5, 2.5], [1.0], ["1"], "ab", [True], [2**70]),
        *([1, 2.5], (1, "2"), [1, 2**70], [1, None]),
    ],
)
def test_tokens_that_are_no_whole_numbers_have_no_key(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="whole numbers"):
        prefix_block_keys(tokens, 1)


def test_keys_are_of_the_tokens_whatever_holds_them() -> None:
    tokens = [5, 0, 128_000, 2**40, -1, 7, 8, 9]
    holders: list[Any] = [
        *(tokens, tuple(tokens)),
        *(numpy.array(tokens), torch.tensor(tokens)),
    ]
    assert len({prefix_block_keys(held, 4) for held in holders}) == 1


def test_keys_stay_as_they_are_for_what_a_disk_has_kept() -> None:
    keys = prefix_block_keys([1, 2, 3, 4], 2, KVFingerprint(model="m"), "tenant")
    assert [key[:16] for key in keys] == ["5e344e2af55d5b19", "7398314a0810b099"]


def test_ranks_and_namespaces_have_keys_of_their_own() -> None:
    assert rank_block_keys(["a", "b"], "n", 1) == ["a/n/1", "b/n/1"]


async def test_others_have_their_turn_while_many_keys_of_ranks_are_made() -> None:
    blocks = [f"{number}" for number in range(1000)]
    making = asyncio.create_task(keys_of_ranks(blocks, "n", range(2, 4)))
    for _ in range(3):
        await asyncio.sleep(0)
        assert not making.done()
    assert await making == [f"{key}/n/{rank}" for key in blocks for rank in (2, 3)]


def test_a_digest_is_of_the_first_tokens_only() -> None:
    assert prompt_digest([1, 2, 3], 2) == prompt_digest((1, 2), 2)
    assert prompt_digest([1, 2, 3], 2) != prompt_digest([1, 2, 3], 3)


def test_no_salt_is_told_by_no_digest() -> None:
    assert salt_digest("") == b""
    assert len({salt_digest(salt) for salt in ("", "a", "b", "\ud800")}) == 4


def test_any_salt_is_one() -> None:
    keys = {prefix_block_keys((1, 2), 2, None, salt) for salt in ("", "\ud800", "a")}
    assert len(keys) == 3


def test_each_token_counts_and_each_block_is_of_its_own_tokens() -> None:
    tokens = list(range(12))
    keys = prefix_block_keys(tokens, 4)
    for place in range(12):
        other = prefix_block_keys([*tokens[:place], 99, *tokens[place + 1 :]], 4)
        same = [a == b for a, b in zip(keys, other, strict=True)]
        assert same == [block < place // 4 for block in range(3)]
    assert len(set(prefix_block_keys([7] * 12, 4))) == 3


def test_a_header_survives_being_a_tensor() -> None:
    header = EntryHeader(
        engine_id="e",
        rank=1,
        block_size=16,
        layers=("a", "b"),
        shape=toy_shape(ToyModel()),
    )
    assert EntryHeader.of(header.tensor()) == header


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, dtype=torch.uint8),
        torch.empty(0, dtype=torch.uint8),
        EntryHeader(engine_id="e", rank=0, block_size=1, layers=(), version=2).tensor(),
    ],
)
def test_what_is_no_header_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(IncompatiblePeer):
        EntryHeader.of(tensor)


@pytest.mark.parametrize(
    "spec", [None, TensorSpec((4,), "int32"), TensorSpec((2**21,), "uint8")]
)
def test_an_entry_without_a_header_is_refused_unread(spec: TensorSpec | None) -> None:
    with pytest.raises(IncompatiblePeer, match="not inserted by a connector"):
        EntryHeader.check_spec(spec)


@pytest.mark.parametrize("written", ["m", {"model": "m"}])
def test_a_fingerprint_has_the_same_keys_however_it_is_written(
    written: str | Mapping[str, str],
) -> None:
    keys = prefix_block_keys([1, 2], 2, KVFingerprint(model="m"))
    assert prefix_block_keys([1, 2], 2, written) == keys


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"fingerprint": 5}, TypeError, "a fingerprint is a model's name"),
        ({"salt": 5}, TypeError, "salt is a str, not 5"),
        ({"token_ids": [[1, 2], [1, 3]]}, ValueError, "ids of one sequence"),
    ],
)
def test_what_would_make_keys_that_nobody_else_has_is_refused(
    given: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        prefix_block_keys(**{"token_ids": [1, 2], "block_size": 2, **given})
