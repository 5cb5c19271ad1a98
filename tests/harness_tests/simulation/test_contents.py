from __future__ import annotations

import random

import msgspec
import pytest
import torch

from asynckv.abc import KVEntry
from harness.simulation.contents import (
    Contents,
    Library,
    Wanted,
    by_field,
    scribble,
    wrong_bytes,
)


def entry_of(contents: Contents) -> KVEntry:
    return KVEntry(
        input_tokens=torch.tensor(contents.tokens),
        roi=None if contents.roi is None else torch.tensor(contents.roi),
        entry_id=contents.entry_id or "chosen by the buffer",
        **by_field(contents.tensors()),
    )


@pytest.fixture
def library() -> Library:
    chance, library = random.Random(1), Library()
    for _ in range(30):
        library.new(chance)
    return library


def test_what_was_inserted_is_recognised(library: Library) -> None:
    for contents in library.all:
        assert library.wrong_entry(entry_of(contents)) == (contents, "")


def test_any_other_byte_is_noticed(library: Library) -> None:
    for contents in library.all:
        entry = entry_of(contents)
        assert isinstance(entry.hidden, torch.Tensor)
        if entry.hidden.numel():
            entry.hidden[-1] ^= 1
            assert "hidden has other bytes" in library.wrong_entry(entry)[1]


def test_other_tokens_and_missing_tensors_are_noticed(library: Library) -> None:
    entry = entry_of(library.all[0])
    other = msgspec.structs.replace(entry, input_tokens=torch.tensor([99]))
    assert "other tokens" in library.wrong_entry(other)[1]
    assert (
        "has the tensors"
        in library.wrong_entry(msgspec.structs.replace(entry, hidden=None))[1]
    )
    stranger = msgspec.structs.replace(entry, extras={})
    assert library.wrong_entry(stranger)[0] is None


def test_a_tensor_of_another_kind_is_noticed(library: Library) -> None:
    contents = library.all[0]
    assert "hidden is torch.float32" in wrong_bytes(contents, "hidden", torch.ones(3))


def test_scribbled_memory_holds_nothing_of_before(library: Library) -> None:
    contents = library.all[0]
    tensors = contents.tensors()
    scribble(tensors)
    assert "number" in wrong_bytes(contents, "extras.number", tensors["extras.number"])


@pytest.mark.parametrize(
    ("wanted", "matched"),
    [
        (Wanted(), 0),
        (Wanted((1,)), 1),
        (Wanted((1, 2, 3, 4)), 3),
        (Wanted((1, 3)), None),
        (Wanted((1,), match="exact"), None),
        (Wanted((1, 2, 3), match="exact"), 3),
        (Wanted((1,), min_matched_tokens=2), None),
        (Wanted(entry_id="e7"), 0),
        (Wanted((1,), entry_id="e8"), None),
    ],
    ids=str,
)
def test_the_rules_of_matching(wanted: Wanted, matched: int | None) -> None:
    contents = Contents(7, "e7", (1, 9, 2, 3), (1, 0, 1, 1), {})
    assert wanted.matched(contents) == matched
