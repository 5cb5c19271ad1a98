from __future__ import annotations

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
