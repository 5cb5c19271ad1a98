from __future__ import annotations

import pytest

from harness.holders import RecordingHolder, draft_of


def test_a_holder_without_a_delivery_says_so() -> None:
    holder = RecordingHolder("it")
    assert holder.entry_id is None
    with pytest.raises(RuntimeError, match="it holds nothing"):
        holder.held()


def test_a_holder_is_charged_up_to_its_bound() -> None:
    holder = RecordingHolder(bound=10)
    holder.charge(6)
    assert holder.may_charge(4)
    assert not holder.may_charge(5)


def test_a_draft_has_one_tensor_and_its_tokens() -> None:
    draft = draft_of("it", (1, 2), 8, streaming=True)
    assert (draft.layout.sizes, draft.charges) == ((8,), [16])
    assert draft.streaming
