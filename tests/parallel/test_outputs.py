from __future__ import annotations

import pytest

from asynckv.parallel.aggregator import KVConnectorOutput


@pytest.mark.parametrize(
    "output",
    [
        KVConnectorOutput(finished_sending={"a"}),
        KVConnectorOutput(finished_recving={"a"}),
        KVConnectorOutput(failed_recving={"a"}),
        KVConnectorOutput(invalid_block_ids={0}),
    ],
)
def test_an_output_with_anything_in_it_is_not_empty(output: KVConnectorOutput) -> None:
    assert not output.is_empty()


def test_an_output_without_members_is_empty() -> None:
    assert KVConnectorOutput(
        finished_sending=set(), expected_finished_count=2
    ).is_empty()


def test_ends_are_added_part_by_part() -> None:
    one, other = KVConnectorOutput(), KVConnectorOutput(finished_sending={"a"})
    one.add_ends(KVConnectorOutput(parts=(other,)))
    one.add_ends(KVConnectorOutput(parts=(KVConnectorOutput(), other)))
    assert [part.finished_sending for part in one.parts] == [{"a"}, {"a"}]
    assert one.finished_sending is None
