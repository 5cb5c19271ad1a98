from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, strategies as st

from asynckv.abc import KVTransferResults
from asynckv.connectors.transfers import (
    ExpectedLoads,
    Phase,
    TransferLedger,
    Transfers,
    Way,
    output_of,
    results_of,
)
from asynckv.testing.blocked import until_blocked


@pytest.fixture
async def transfers() -> AsyncIterator[Transfers]:
    yield (transfers := Transfers())
    await transfers.aclose()


@pytest.fixture
def ledger() -> TransferLedger:
    return TransferLedger()


@pytest.fixture
def loads() -> ExpectedLoads:
    return ExpectedLoads()


async def nothing() -> None:
    pass


async def fails() -> None:
    raise ValueError("no")


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


async def ended(transfers: Transfers, count: int = 1) -> None:
    one_more = asyncio.Semaphore(0)
    transfers.call_when_ended(one_more.release)
    for _ in range(count):
        await one_more.acquire()


async def test_each_end_is_told_once_with_its_reason(transfers: Transfers) -> None:
    transfers.begin("good", "recv", nothing, ((1,),))
    transfers.begin("bad", "recv", fails, ((2,), (3,)))
    transfers.begin("sent", "send", fails)
    await ended(transfers, 3)
    results = transfers.results()
    assert results.finished_recving == {"good", "bad"}
    assert results.failed_recving == {"bad"}
    assert results.invalid_block_ids == {2, 3}
    assert results.failed_sending == results.finished_sending == {"sent"}
    assert results.reasons["bad"] == "ValueError: no"
    assert not transfers.results()


async def test_one_that_could_not_begin_is_told_too(transfers: Transfers) -> None:
    told: list[KVTransferResults] = []
    transfers.call_when_ended(lambda: told.append(transfers.results()))
    transfers.refuse("r", "recv", ((1, 2),), "no such peer")
    assert told[0].finished_recving == told[0].failed_recving == {"r"}
    assert told[0].invalid_block_ids == {1, 2}
    assert told[0].reasons == {"r": "no such peer"}


async def test_a_cancelled_one_is_told_when_it_is_quiet(transfers: Transfers) -> None:
    quiet = asyncio.Event()

    async def stubborn() -> None:
        try:
            await for_ever()
        finally:
            await quiet.wait()

    transfers.begin("r", "recv", stubborn, ((1,),))
    await asyncio.sleep(0)
    transfers.cancel("r", "recv")
    await asyncio.sleep(0)
    assert not transfers.results()
    quiet.set()
    await ended(transfers)
    assert transfers.results().reasons == {"r": "cancelled"}


async def test_what_takes_too_long_is_given_up(transfers: Transfers) -> None:
    slow = transfers.begin("slow", "send", for_ever)
    fast = transfers.begin("fast", "send", nothing)
    assert slow is not None and fast is not None
    for state in (slow, fast):
        transfers.fail_after(state, 0.01)
    await ended(transfers, 2)
    results = transfers.results()
    assert results.failed_sending == {"slow"}
    assert "longer than 0.01 s" in results.reasons["slow"]


async def test_of_those_that_failed_it_is_said_which_found_no_room(
    transfers: Transfers,
) -> None:
    for name, is_full in (("full", True), ("slow", False)):
        state = transfers.begin(name, "send", for_ever)
        assert state is not None
        transfers.fail_after(state, 0.01, lacks_room=functools.partial(bool, is_full))
    transfers.refuse("refused", "send", (), "no room", lacks_room=True)
    transfers.refuse("unknown", "send", (), "no such peer")
    await ended(transfers, 2)
    results = transfers.results()
    assert results.failed_sending == {"full", "slow", "refused", "unknown"}
    assert results.full_sending == {"full", "refused"}


async def test_a_request_has_one_transfer_of_a_way(transfers: Transfers) -> None:
    assert transfers.begin("r", "recv", for_ever) is not None
    assert transfers.begin("r", "recv", for_ever) is None
    assert transfers.count("recv") == 1
    await transfers.aclose()
    assert transfers.results().failed_recving == {"r"}


async def test_what_begins_while_it_is_closing_is_refused(
    transfers: Transfers,
) -> None:
    quiet, called = asyncio.Event(), list[str]()

    async def stubborn() -> None:
        try:
            await for_ever()
        finally:
            await quiet.wait()

    transfers.begin("old", "recv", stubborn)
    await asyncio.sleep(0)
    closing = asyncio.create_task(transfers.aclose())
    await until_blocked(closing)
    late = transfers.begin(
        "new", "recv", for_ever, ((1,),), lambda: called.append("end")
    )
    quiet.set()
    await closing  # it waits for no load that had the time to begin
    assert (late, called) == (None, ["end"])
    assert transfers.results().reasons["new"] == "the connector is closed"


async def test_closing_ends_what_nobody_is_told_of_too(transfers: Transfers) -> None:
    transfers.begin_unreported(for_ever, "other")
    transfers.begin_unreported(fails, "failing")
    waiting = asyncio.create_task(transfers.wait_others())
    await asyncio.sleep(0)
    await transfers.aclose()
    await waiting
    transfers.begin_unreported(for_ever, "late")
    assert transfers.others == 0


async def test_of_what_may_be_given_up_the_oldest_is(transfers: Transfers) -> None:
    done = list[int]()

    async def wait(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            done.append(number)

    transfers.begin_unreported(functools.partial(wait, -1), "one that is needed")
    for number in range(5):
        await asyncio.sleep(0)
        run = functools.partial(wait, number)
        transfers.begin_unreported(run, "one of five", at_most=2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (done, transfers.others) == ([0, 1, 2], 3)
    await transfers.aclose()


def test_an_end_is_told_once(ledger: TransferLedger) -> None:
    state = ledger.begin("r", "recv")
    assert state is not None
    assert ledger.settle(state)
    assert not ledger.settle(state)
    assert [one.request_id for one in ledger.take_unreported()] == ["r"]
    assert ledger.take_unreported() == []
    assert (ledger.counters.done, ledger.counters.duplicate) == (1, 1)


def test_the_two_directions_of_a_request_are_two_transfers(
    ledger: TransferLedger,
) -> None:
    assert ledger.begin("r", "recv") and ledger.begin("r", "send")
    assert ledger.begin("r", "recv") is None
    assert len(ledger) == 2


def test_what_was_cancelled_fails_even_if_all_of_it_came(
    ledger: TransferLedger,
) -> None:
    state = ledger.begin("r", "recv", ((1, 2),))
    assert ledger.cancel("r", "recv") is state
    assert ledger.cancel("r", "recv") is None, "it is stopping already"
    assert state is not None and not state.is_over
    ledger.settle(state)
    (told,) = ledger.take_unreported()
    assert told.reason == "cancelled"
    assert told.block_ids == ((1, 2),)
    assert told.phase is Phase.TOLD


def test_late_and_unknown_ends_are_counted_apart(ledger: TransferLedger) -> None:
    ledger.begin("r", "recv")
    assert ledger.settle_by_id("r", "recv") is not None
    ledger.take_unreported()
    assert ledger.settle_by_id("r", "recv") is None
    assert ledger.settle_by_id("stranger", "recv") is None
    assert ledger.cancel("r", "recv") is None
    assert (ledger.counters.late, ledger.counters.unknown) == (2, 1)


def test_an_id_may_live_again_and_its_first_life_says_nothing_more(
    ledger: TransferLedger,
) -> None:
    first = ledger.begin("r", "recv")
    assert first is not None
    ledger.settle(first)
    ledger.take_unreported()
    second = ledger.begin("r", "recv")
    assert not ledger.settle(first, "too late")
    assert second is not None and second.phase is Phase.MOVING


def test_only_so_many_ended_ones_are_remembered() -> None:
    ledger = TransferLedger(remembered=2)
    for name in "abc":
        ledger.begin(name, "recv")
        ledger.settle_by_id(name, "recv")
    ledger.take_unreported()
    ledger.settle_by_id("a", "recv")
    ledger.settle_by_id("c", "recv")
    assert (ledger.counters.unknown, ledger.counters.late) == (1, 1)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "hear", "fail", "cancel", "take"]),
        st.sampled_from("ab"),
        st.sampled_from(["send", "recv"]),
    ),
    max_size=40,
)


@given(ACTIONS)
def test_whatever_is_said_each_life_is_told_exactly_once(
    actions: list[tuple[str, str, str]],
) -> None:
    ledger, begun, told = TransferLedger(), 0, 0
    for action, name, way in actions:
        side: Way = "send" if way == "send" else "recv"
        if action == "begin":
            begun += ledger.begin(name, side) is not None
        elif action == "take":
            told += len(ledger.take_unreported())
        elif action == "cancel":
            ledger.cancel(name, side)
        else:
            ledger.settle_by_id(name, side, "why" if action == "fail" else "")
    open_ones = len(ledger)
    for name in "ab":
        for way in ("send", "recv"):
            ledger.settle_by_id(name, "send" if way == "send" else "recv")
    assert told + len(ledger.take_unreported()) == begun
    assert ledger.counters.done + ledger.counters.failed == begun
    assert open_ones <= 4 and len(ledger) == 0


def test_each_cancelled_transfer_is_counted_once(ledger: TransferLedger) -> None:
    for name in "ab":
        ledger.begin(name, "recv")
        for _ in range(2):
            ledger.cancel(name, "recv")
    assert ledger.counters.cancelled == 2


def said(*names: str, failed: tuple[str, ...] = ()) -> KVTransferResults:
    return KVTransferResults(
        finished_sending=frozenset({"s"}),
        finished_recving=frozenset(names) | frozenset(failed),
        failed_recving=frozenset(failed),
        invalid_block_ids=frozenset({1, 2, 99}),
    )


def test_only_what_was_ordered_is_believed(loads: ExpectedLoads) -> None:
    assert loads.begin("r", ((1, 2), (3,)))
    believed = loads.settle(said("r", "stranger"))
    assert believed.finished_recving == {"r"}
    assert believed.finished_sending == frozenset()
    assert believed.invalid_block_ids == frozenset()
    assert not loads.settle(said("r"))
    assert (loads.counters.unknown, loads.counters.late) == (1, 1)


def test_of_a_failed_load_its_own_blocks_are_invalid_and_no_others(
    loads: ExpectedLoads,
) -> None:
    loads.begin("r", ((1, 2), (3,)))
    believed = loads.settle(said(failed=("r",)))
    assert believed.failed_recving == {"r"}
    assert believed.invalid_block_ids == {1, 2, 3}
    assert believed.reasons == {"r": "the load failed"}


def test_an_aborted_load_holds_its_blocks_until_it_has_ended(
    loads: ExpectedLoads,
) -> None:
    assert not loads.abort("r"), "nothing is under way"
    loads.begin("r", ((1,),))
    assert loads.are_free("r"), "it is no older one's"
    assert loads.abort("r")
    assert loads.has_aborts
    assert loads.take_aborts() == ("r",)
    assert not loads.are_free("r")
    assert loads.settle(said("r")).failed_recving == {"r"}
    assert loads.are_free("r") and len(loads) == 0


def test_a_second_load_of_one_request_is_counted_and_refused(
    loads: ExpectedLoads,
) -> None:
    assert loads.begin("r", ((1,),))
    assert not loads.begin("r", ((2,),))
    assert loads.counters.duplicate == 1
    loads.abort("r")
    loads.clear()
    assert loads.take_aborts() == ()


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
