from __future__ import annotations

from asynckv.abc import KVTransferResults
from asynckv.connectors.transfers import output_of, results_of


def test_nothing_that_a_worker_says_is_lost_on_the_way_to_its_scheduler() -> None:
    part = KVTransferResults(
        finished_sending=frozenset("ab"),
        failed_sending=frozenset("a"),
        full_sending=frozenset("a"),
        finished_recving=frozenset("cd"),
        failed_recving=frozenset("d"),
        invalid_block_ids=frozenset({1}),
        reasons={"a": "no room", "d": "PeerLost"},
    )
    whole = part | KVTransferResults(parts=(part, KVTransferResults(), part))
    assert results_of(output_of(whole)) == whole
