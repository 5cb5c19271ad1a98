from __future__ import annotations

import pytest
import torch

from asynckv.abc import KVEntry


def make_entry() -> KVEntry:
    return KVEntry(
        input_tokens=torch.arange(4),
        roi=None,
        key={"0": torch.zeros(2, 3), "1": torch.zeros(2, 3)},
        value=torch.zeros(5),
        hidden=None,
        extras={"logits": torch.zeros(7)},
    )


def test_an_entry_unpacks_as_the_five_fields_of_the_original() -> None:
    entry = make_entry()
    input_tokens, roi, key, value, hidden = entry
    assert input_tokens is entry.input_tokens
    assert (roi, hidden) == (None, None)
    assert key is entry.key
    assert value is entry.value


def test_the_bytes_of_an_entry_are_those_of_all_its_tensors() -> None:
    assert make_entry().nbytes == 4 * 8 + 4 * (2 * 6 + 5 + 7)


def test_an_entry_knows_every_tensor_it_holds() -> None:
    assert [tensor.numel() for tensor in make_entry().tensors()] == [4, 6, 6, 5, 7]


def test_an_entry_is_itself_only() -> None:
    entry = make_entry()
    assert entry == entry
    assert entry != make_entry()


def test_the_one_tensor_of_key_or_value_is_had_without_a_check() -> None:
    entry = KVEntry(None, None, torch.ones(2), torch.zeros(2), None)
    assert entry.key_tensor is entry.key
    assert entry.value_tensor is entry.value
    with pytest.raises(TypeError, match=r"one tensor: use entry\.key_tensor"):
        _ = entry.layers


def test_layers_have_their_key_and_their_value_beside_each_other() -> None:
    keys, values = {"0": torch.ones(2), "1": torch.ones(3)}, {"0": torch.zeros(2)}
    entry = KVEntry(None, None, keys, values, None)
    assert entry.layers == {"0": (keys["0"], values["0"]), "1": (keys["1"],)}
    with pytest.raises(TypeError, match=r"use entry\.layers"):
        _ = entry.value_tensor


def test_an_entry_without_key_and_value_says_so() -> None:
    entry = KVEntry(None, None, None, None, torch.ones(2))
    for name in ("key_tensor", "value_tensor", "layers"):
        with pytest.raises(TypeError, match="this entry has n"):
            getattr(entry, name)


def test_an_entry_is_shown_without_its_tensors() -> None:
    shown = "<KVEntry '', 4 tokens, 128 bytes, attempt 1>"
    assert repr(make_entry()) == shown
