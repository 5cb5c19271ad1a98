from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from asynckv.buffers.entries.entries import (
    Lease,
    StoredEntry,
    Waiter,
    make_draft,
)
from asynckv.tensors.arena import HeapArena
from asynckv.transfers.layout import layout_of
from asynckv.transfers.manifest import content_digest
from asynckv.transfers.queries import MAX_ID_LENGTH, Query, as_tokens
from asynckv.types import TensorSpec
from harness.holders import RecordingHolder, draft_of


def placed(tokens: torch.Tensor) -> StoredEntry:
    draft = msgspec.structs.replace(draft_of("it"), input_tokens=as_tokens(tokens))
    entry = StoredEntry(draft, 1)
    entry.place_regions(
        HeapArena(100).allocate(draft.layout.sizes, draft.charges) or []
    )
    entry.complete = True
    return entry


def test_tokens_are_copies_and_are_charged() -> None:
    tokens = torch.tensor([1, 2])
    entry = placed(tokens)
    tokens.fill_(9)
    assert entry.key() == torch.tensor([1, 2]).numpy().tobytes()
    assert [region.nbytes for region in entry.regions] == [8, 16]


def test_beginning_again_forgets_what_landed() -> None:
    entry = placed(torch.tensor([1, 2]))
    entry.parts[0].digest = b"d"
    entry.landed.append(0)
    entry.begin_again()
    assert not entry.complete
    assert entry.landed == []
    assert entry.parts[0].digest is None


def test_what_has_left_has_no_memory() -> None:
    entry = placed(torch.tensor([1, 2]))
    entry.drop_regions()
    assert entry.regions == ()
    assert entry.parts[0].region is None


def test_the_beginning_of_an_offer_is_kept_once_nothing_can_change() -> None:
    entry = placed(torch.tensor([1, 2]))
    assert entry.preamble() is entry.preamble()
    entry.begin_again()
    first = entry.preamble()
    entry.parts[0].digest = b"d"
    assert entry.preamble() != first


@pytest.mark.parametrize(
    ("nbytes", "tokens", "is_made"),
    [(8, 2, True), (64 * 1024, 2, True), (64 * 1024 + 1, 2, False), (8, 200, False)],
)
def test_the_beginning_of_a_small_offer_is_made_before_it_is_asked_for(
    nbytes: int, tokens: int, is_made: bool
) -> None:
    entry = StoredEntry(draft_of("it", tuple(range(tokens)), nbytes), 1)
    entry.make_complete()
    entry.parts[0].digest = b"other"
    assert (b"other" not in entry.preamble()) is is_made


@pytest.mark.parametrize(("parts", "is_made"), [(16, True), (17, False)])
def test_an_offer_of_many_parts_is_not_made_before_it_is_asked_for(
    parts: int, is_made: bool
) -> None:
    specs = {str(number): TensorSpec((0,), "uint8") for number in range(parts)}
    draft = msgspec.structs.replace(draft_of("it", (1, 2), 0), layout=layout_of(specs))
    entry = StoredEntry(draft, 1)
    entry.make_complete()
    entry.parts[0].digest = b"other"
    assert (b"other" not in entry.preamble()) is is_made


def test_the_digest_covers_tokens_and_tensors() -> None:
    digests = set()
    for tokens in ([1], [2]):
        for digest in (b"x", b"y"):
            entry = placed(torch.tensor(tokens))
            entry.parts[0].digest = digest
            digests.add(entry.digest())
            assert entry.digest() == content_digest(
                entry.draft.layout, [digest], entry.input_tokens, entry.roi
            )
    assert len(digests) == 4


def test_what_a_consumer_paid_is_given_back_once() -> None:
    holder = RecordingHolder()
    waiter = Waiter(Query(None), holder, 1, None)
    lease = Lease(StoredEntry(draft_of("it"), 1), waiter, 0, 1, b"token")
    lease.charge()
    assert holder.charged_bytes == 16
    for _ in range(2):
        lease.uncharge()
    assert holder.charged_bytes == 0


def test_a_lease_shows_neither_its_token_nor_the_prompt() -> None:
    waiter = Waiter(Query(b"prompt"), RecordingHolder(), 3, None)
    lease = Lease(StoredEntry(draft_of("it"), 1), waiter, 0, 1, b"token")
    assert (repr(lease), repr(waiter)) == ("<Lease 1 of entry it>", "<Waiter 3>")


SPECS = {"key": TensorSpec((3,), "float32")}


def test_a_draft_without_an_id_gets_one_of_its_own() -> None:
    drafts = [
        make_draft([1], [1], SPECS, entry_id=None, ttl_s=None, deliveries=1)
        for _ in range(2)
    ]
    assert len({draft.entry_id for draft in drafts}) == 2
    assert (drafts[0].layout.sizes, drafts[0].charges) == ((12,), [8, 8])


@pytest.mark.parametrize(
    "wrong",
    [
        {"deliveries": 0},
        {"ttl_s": -1},
        {"ttl_s": float("inf")},
        {"entry_id": "x" * (MAX_ID_LENGTH + 1)},
    ],
)
def test_what_an_insert_says_is_checked(wrong: dict[str, Any]) -> None:
    options: dict[str, Any] = {"entry_id": None, "ttl_s": 1, "deliveries": 1} | wrong
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make_draft([1], None, {}, **options)
