from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from asynckv.abc import (
    KVAnswer,
    KVConnectorStep,
    KVRequest,
    KVScheduled,
    KVTransferResults,
)
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.requests import StoreMetadata
from asynckv.connectors.store.scheduler import StoreScheduler
from asynckv.errors import WrongLoop

REQUEST = KVRequest("r", tuple(range(10)))
ENGINE = KVEngine(engine_id="E", block_size=4, tp_size=2)


def make() -> StoreScheduler:
    config = KVTransferConfig(
        kv_role="kv_both",
        kv_connector_extra_config={
            "store": "mem://no-such-store",
            "fingerprint": "toy",
        },
    )
    return StoreScheduler(config, ENGINE)


def orders(scheduler: StoreScheduler, *scheduled: KVScheduled) -> StoreMetadata:
    metadata = scheduler.build_connector_meta(KVConnectorStep(scheduled))
    assert isinstance(metadata, StoreMetadata)
    return metadata


def test_until_its_question_is_answered_a_request_is_ask_again() -> None:
    scheduler = make()
    for _ in range(2):
        assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (None, False)
    (question,) = scheduler.take_questions()
    assert len(question.keys) == 2
    assert scheduler.take_questions() == ()
    scheduler.take_answer(KVAnswer("stranger", 7))
    scheduler.take_answer(KVAnswer("r", 99))
    assert scheduler.get_num_new_matched_tokens(REQUEST, 4) == (4, True)
    assert scheduler.get_num_new_matched_tokens(REQUEST, 8) == (0, False)


def test_an_answer_to_an_older_request_of_the_same_id_says_nothing() -> None:
    scheduler = make()
    scheduler.on_new_request(REQUEST)
    (old,) = scheduler.take_questions()
    scheduler.request_finished(REQUEST, ())
    scheduler.on_new_request(REQUEST)
    (question,) = scheduler.take_questions()
    scheduler.take_answer(old.answered(2))
    assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (None, False)
    scheduler.take_answer(question.answered(1))
    assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (4, True)


async def test_a_store_that_is_not_there_has_nothing() -> None:
    scheduler = make()
    await scheduler.start()
    scheduler.on_new_request(REQUEST)
    (question,) = scheduler.take_questions()
    assert (await scheduler.ask(question)).num_keys == 0
    assert scheduler.statistics().unanswered == 1
    scheduler.abort()


def test_what_is_stored_is_loaded_and_the_rest_is_saved_once() -> None:
    scheduler = make()
    scheduler.on_new_request(REQUEST)
    scheduler.take_answer(KVAnswer("r", 1))
    scheduler.update_state_after_alloc(REQUEST, ((7, 8, 9),), 4)
    keys = scheduler.take_questions()[0].keys
    (load,) = orders(scheduler).loads
    assert (load.block_keys, load.block_ids) == (keys[:1], ((7,),))
    scheduled = KVScheduled("r", ((7, 8, 9),), 4, 6)
    (save,) = orders(scheduler, scheduled).saves
    assert (save.block_keys, save.block_ids) == (keys[1:], ((8,),))
    assert save.first_block == 1
    assert orders(scheduler, scheduled).saves == ()
    assert scheduler.has_pending_work()


def test_an_aborted_load_holds_its_blocks() -> None:
    scheduler = make()
    scheduler.on_new_request(REQUEST)
    scheduler.take_answer(KVAnswer("r", 2))
    scheduler.update_state_after_alloc(REQUEST, ((7, 8, 9),), 8)
    assert scheduler.request_finished_all_groups(REQUEST, ((7, 8, 9),)) == (True, None)
    assert orders(scheduler).aborts == ("r",)
    said = KVTransferResults(finished_recving=frozenset({"r"}))
    assert scheduler.update_connector_output(said).failed_recving == {"r"}
    assert not scheduler.has_pending_work()
    scheduler.shutdown()


def test_a_request_that_loads_nothing_does_not_take_an_id_that_is_held() -> None:
    scheduler, short = make(), KVRequest("r", (1,))
    scheduler.on_new_request(REQUEST)
    scheduler.take_answer(KVAnswer("r", 2))
    scheduler.update_state_after_alloc(REQUEST, ((7, 8, 9),), 8)
    scheduler.request_finished(REQUEST, ((7, 8, 9),))
    assert scheduler.get_num_new_matched_tokens(short, 0) == (None, False)
    said = KVTransferResults(finished_recving=frozenset({"r"}))
    scheduler.update_connector_output(said)
    assert scheduler.get_num_new_matched_tokens(short, 0) == (0, False)


def test_what_failed_to_load_is_saved_again_when_it_is_computed() -> None:
    scheduler = make()
    scheduler.on_new_request(REQUEST)
    scheduler.take_answer(KVAnswer("r", 2))
    scheduler.update_state_after_alloc(REQUEST, ((7, 8, 9),), 8)
    lost = frozenset({"r"})
    scheduler.update_connector_output(
        KVTransferResults(finished_recving=lost, failed_recving=lost)
    )
    (save,) = orders(scheduler, KVScheduled("r", ((7, 8, 9),), 0, 10)).saves
    assert save.block_ids == ((7, 8),)
    assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (0, False)


def test_an_old_answer_is_asked_for_again_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, now_s = make(), 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    scheduler.on_new_request(REQUEST)
    asked = 0
    while questions := scheduler.take_questions():
        asked += len(questions)
        scheduler.take_answer(questions[0].answered(2))
        assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (8, True)
        now_s += 60
        again = scheduler.get_num_new_matched_tokens(REQUEST, 0)
        assert again == ((None, False) if asked < 8 else (8, True))
    assert asked == 8


def test_a_block_is_stored_once_all_of_it_is_computed() -> None:
    scheduler = make()
    scheduler.on_new_request(REQUEST)
    scheduler.take_answer(KVAnswer("r", 0))
    saved = [
        [save.block_ids for save in orders(scheduler, part).saves]
        for before, count in ((0, 3), (3, 3), (6, 1), (7, 1), (8, 2))
        for part in [KVScheduled("r", ((7, 8, 9),), before, count)]
    ]
    assert saved == [[], [((7,),)], [], [((8,),)], []]


def test_an_answer_counts_once_and_each_question_is_another() -> None:
    scheduler = make()
    for name in "ab":
        scheduler.on_new_request(KVRequest(name, tuple(range(10))))
    questions = scheduler.take_questions()
    assert len({one.number for one in questions}) == 2
    for one in questions:
        scheduler.take_answer(one.answered(1))
        scheduler.take_answer(one.answered(2))
    statistics = scheduler.statistics()
    assert (statistics.asked, statistics.hit_blocks, statistics.requests) == (2, 2, 2)


def test_what_is_shut_down_has_nothing_under_way() -> None:
    scheduler = make()
    scheduler.on_new_request(REQUEST)
    scheduler.take_answer(KVAnswer("r", 2))
    scheduler.update_state_after_alloc(REQUEST, ((7, 8, 9),), 8)
    scheduler.on_new_request(KVRequest("s", tuple(range(10))))
    scheduler.request_finished(REQUEST, ((7, 8, 9),))
    scheduler.shutdown()
    assert scheduler.statistics().requests == 0
    assert not scheduler.take_questions()
    metadata = orders(scheduler)
    assert (metadata.loads, metadata.aborts) == ((), ())


def test_a_scheduler_is_one_threads() -> None:
    scheduler, refused = make(), list[str]()
    scheduler.on_new_request(REQUEST)

    def use(call: Callable[[], object]) -> None:
        try:
            call()
        except WrongLoop as exc:
            refused.append(str(exc))

    calls: list[Callable[[], object]] = [
        lambda: scheduler.on_new_request(REQUEST),
        lambda: scheduler.get_num_new_matched_tokens(REQUEST, 0),
        scheduler.take_questions,
        lambda: scheduler.take_answer(KVAnswer("r", 1)),
        lambda: scheduler.update_state_after_alloc(REQUEST, ((1, 2, 3),), 0),
        lambda: scheduler.build_connector_meta(KVConnectorStep()),
        lambda: scheduler.update_connector_output(KVTransferResults()),
        lambda: scheduler.request_finished(REQUEST, ()),
    ]
    for call in calls:
        thread = threading.Thread(target=use, args=(call,))
        thread.start()
        thread.join()
    assert len(refused) == len(calls)


def test_what_was_found_long_ago_and_is_there_no_more_is_saved_from_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, now_s = make(), 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    scheduler.on_new_request(REQUEST)
    for there in (2, 0):
        (question,) = scheduler.take_questions()
        scheduler.take_answer(question.answered(there))
        now_s += 60
        scheduler.get_num_new_matched_tokens(REQUEST, 0)
    (save,) = orders(scheduler, KVScheduled("r", ((7, 8, 9),), 0, 10)).saves
    assert (save.first_block, save.block_ids) == (0, ((7, 8),))
