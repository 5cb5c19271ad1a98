from __future__ import annotations

import torch

from asynckv.abc import KVEntry
from harness.crashes.contents import is_right, named_tensors, tokens_of


def whole(entry_id: str) -> KVEntry:
    tensors = named_tensors(entry_id)
    key = {name.removesuffix(".key"): tensor for name, tensor in tensors.items()}
    return KVEntry(torch.tensor(tokens_of(entry_id)), None, key, None, None)


def test_an_entry_is_what_its_id_says() -> None:
    assert is_right("producer_0-1", whole("producer_0-1"))
    assert is_right("producer_0-1", named_tensors("producer_0-1"))


def test_another_entry_is_not() -> None:
    assert not is_right("producer_0-2", whole("producer_0-1"))


def test_one_flipped_bit_is_seen() -> None:
    tensors = named_tensors("producer_0-1")
    tensors["2.key"][-1] ^= 1
    assert not is_right("producer_0-1", tensors)


def test_other_tokens_and_missing_ones_are_seen() -> None:
    entry = whole("producer_0-1")
    other = KVEntry(torch.tensor([1]), None, entry.key, None, None)
    none = KVEntry(None, None, entry.key, None, None)
    assert not is_right("producer_0-1", other)
    assert not is_right("producer_0-1", none)
