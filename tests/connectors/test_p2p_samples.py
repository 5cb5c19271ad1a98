from __future__ import annotations

import msgspec
import pytest

from asynckv.abc import KVRequest
from asynckv.connectors.requests import SampledPrompts, SaveOrder

SAMPLE = KVRequest("0_a", (1, 2, 3), {"do_remote_decode": True}, parent_id="a")


def test_samples_of_one_prompt_share_a_transfer_also_when_one_has_ended() -> None:
    prompts = SampledPrompts()
    first = prompts.join(SAMPLE, "t", "D")
    first.unfinished -= 1
    second = msgspec.structs.replace(SAMPLE, request_id="1_a")
    assert prompts.join(second, "u", "D") is first
    assert (first.transfer_id, first.unfinished) == ("t", 1)


@pytest.mark.parametrize(
    "other",
    [
        msgspec.structs.replace(SAMPLE, request_id="1_a", token_ids=(1, 2, 4)),
        msgspec.structs.replace(SAMPLE, request_id="1_a", salt="s"),
        msgspec.structs.replace(SAMPLE, request_id="1_b", parent_id="b"),
        msgspec.structs.replace(SAMPLE, request_id="1_a", parent_id=""),
        msgspec.structs.replace(
            SAMPLE, request_id="1_a", kv_transfer_params={"transfer_id": "u"}
        ),
        SAMPLE,  # again: then its siblings come again too
    ],
)
def test_whatever_may_be_another_prompt_has_a_transfer_of_its_own(
    other: KVRequest,
) -> None:
    prompts = SampledPrompts()
    prompts.join(SAMPLE, "t", "D")
    assert prompts.join(other, "u", "D").transfer_id == "u"


def test_for_another_peer_it_is_another_transfer() -> None:
    prompts = SampledPrompts()
    prompts.join(SAMPLE, "t", "D")
    second = msgspec.structs.replace(SAMPLE, request_id="1_a")
    assert prompts.join(second, "u", "E").transfer_id == "u"


def test_what_was_withdrawn_is_not_shared_with_who_comes_later() -> None:
    prompts = SampledPrompts()
    saved = prompts.join(SAMPLE, "t", "D")
    saved.order = order = SaveOrder("0_a", "t", "D", (), ())
    assert saved.withdraw() is None  # one may still be answered with it
    saved.unfinished -= 1
    assert (saved.withdraw(), saved.withdraw()) == (order, None)
    late = msgspec.structs.replace(SAMPLE, request_id="1_a")
    assert prompts.join(late, "u", "D").transfer_id == "u"


def test_prompts_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynckv.connectors.requests._REMEMBERED", 2)
    prompts = SampledPrompts()
    for parent in "abc":
        sample = msgspec.structs.replace(SAMPLE, parent_id=parent)
        prompts.join(sample, parent, "D")
    late = msgspec.structs.replace(SAMPLE, request_id="1_a")
    assert prompts.join(late, "u", "D").transfer_id == "u"
