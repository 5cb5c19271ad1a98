from __future__ import annotations

from typing import Any

import pytest

from asynckv.buffers.entries.entries import make_draft
from asynckv.transfers.queries import MAX_ID_LENGTH
from asynckv.types import TensorSpec

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
