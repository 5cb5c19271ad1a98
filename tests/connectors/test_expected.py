from __future__ import annotations

from asynckv.abc import KVTransferResults
from asynckv.connectors.transfers import ExpectedLoads


def said(*names: str, failed: tuple[str, ...] = ()) -> KVTransferResults:
    return KVTransferResults(
        finished_sending=frozenset({"s"}),
        finished_recving=frozenset(names) | frozenset(failed),
        failed_recving=frozenset(failed),
        invalid_block_ids=frozenset({1, 2, 99}),
    )


def test_only_what_was_ordered_is_believed() -> None:
    loads = ExpectedLoads()
    assert loads.begin("r", ((1, 2), (3,)))
    believed = loads.hear(said("r", "stranger"))
    assert believed.finished_recving == {"r"}
    assert believed.finished_sending == frozenset()
    assert believed.invalid_block_ids == frozenset()
    assert not loads.hear(said("r"))
    assert (loads.counters.unknown, loads.counters.late) == (1, 1)


def test_of_a_failed_load_its_own_blocks_are_invalid_and_no_others() -> None:
    loads = ExpectedLoads()
    loads.begin("r", ((1, 2), (3,)))
    believed = loads.hear(said(failed=("r",)))
    assert believed.failed_recving == {"r"}
    assert believed.invalid_block_ids == {1, 2, 3}
    assert believed.reasons == {"r": "the load failed"}


def test_an_aborted_load_holds_its_blocks_until_it_has_ended() -> None:
    loads = ExpectedLoads()
    assert not loads.abort("r"), "nothing is under way"
    loads.begin("r", ((1,),))
    assert loads.are_quiet("r"), "it is no older one's"
    assert loads.abort("r")
    assert loads.has_aborts
    assert loads.take_aborts() == ("r",)
    assert not loads.are_quiet("r")
    assert loads.hear(said("r")).failed_recving == {"r"}
    assert loads.are_quiet("r") and len(loads) == 0


def test_a_second_load_of_one_request_is_counted_and_refused() -> None:
    loads = ExpectedLoads()
    assert loads.begin("r", ((1,),))
    assert not loads.begin("r", ((2,),))
    assert loads.counters.duplicate == 1
    loads.abort("r")
    loads.clear()
    assert loads.take_aborts() == ()
