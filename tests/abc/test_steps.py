from __future__ import annotations

import msgspec

from asynckv.abc import KVConnectorStep, KVRequest, KVScheduled, KVTransferResults


def test_results_are_united_each_request_once() -> None:
    one = KVTransferResults(
        finished_recving=frozenset({"a"}),
        failed_recving=frozenset({"a"}),
        invalid_block_ids=frozenset({1}),
        reasons={"a": "lost"},
    )
    two = KVTransferResults(
        finished_sending=frozenset({"b"}),
        finished_recving=frozenset({"a", "c"}),
        full_sending=frozenset({"b"}),
    )
    both = one | two
    assert both.finished_recving == {"a", "c"}
    assert both.finished_sending == both.full_sending == {"b"}
    assert both.failed_recving == {"a"}
    assert both.reasons == {"a": "lost"}


def test_what_is_of_one_part_stays_in_it() -> None:
    a, b = (KVTransferResults(finished_recving=frozenset({name})) for name in "ab")
    none = KVTransferResults()
    one, other = KVTransferResults(parts=(a,)), KVTransferResults(parts=(none, b))
    assert (one | other).parts == (other | one).parts == (a, b)


def test_nothing_finished_is_false() -> None:
    assert not KVTransferResults()
    assert KVTransferResults(finished_recving=frozenset({"a"}))


def test_what_crosses_processes_can_be_encoded() -> None:
    request = KVRequest("r", (1, 2, 3), {"transfer_id": "t"})
    step = KVConnectorStep((KVScheduled("r", ((4, 5),), 0, 3),), frozenset({"p"}))
    for value in (request, step, KVTransferResults(reasons={"a": "b"})):
        encoded = msgspec.msgpack.encode(value)
        assert msgspec.msgpack.decode(encoded, type=type(value)) == value
    assert request.num_tokens == 3
