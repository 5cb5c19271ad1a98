from __future__ import annotations

import msgspec
import pytest

from asynckv.abc import (
    KVAnswer,
    KVConnectorHandshake,
    KVConnectorStep,
    KVRequest,
    KVTransferResults,
)
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.multi import MultiMetadata, MultiScheduler
from asynckv.connectors.registry import make_scheduler

ENGINE = KVEngine(engine_id="E", block_size=4)
BOTH = KVTransferConfig(
    kv_connector="MultiConnector",
    kv_role="kv_both",
    kv_connector_extra_config={
        "connectors": [
            {
                "kv_connector": "P2PConnector",
                "kv_connector_extra_config": {
                    "direction": "pull",
                    "peers": {"P": "mem://multi"},
                },
            },
            {
                "kv_connector": "StoreConnector",
                "kv_connector_extra_config": {
                    "store": "mem://no-such-store",
                    "fingerprint": "toy",
                },
            },
        ]
    },
)


def make() -> MultiScheduler:
    scheduler = make_scheduler(BOTH, ENGINE)
    assert isinstance(scheduler, MultiScheduler)
    return scheduler


def remote(name: str = "r") -> KVRequest:
    asked = {"do_remote_prefill": True, "transfer_id": "t"}
    return KVRequest(name, tuple(range(10)), asked)


def orders(scheduler: MultiScheduler) -> tuple[bytes, ...]:
    metadata = scheduler.build_connector_meta(KVConnectorStep())
    assert isinstance(metadata, MultiMetadata)
    return metadata.parts


def test_it_loads_from_the_first_that_has_something() -> None:
    scheduler = make()
    empty = orders(scheduler)
    assert scheduler.get_num_new_matched_tokens(remote(), 0) == (10, True)
    scheduler.update_state_after_alloc(remote(), ((1, 2, 3),), 10)
    first, second = orders(scheduler)
    assert first != empty[0]
    assert second == empty[1]


def test_one_that_does_not_know_yet_is_waited_for() -> None:
    scheduler, plain = make(), KVRequest("s", tuple(range(10)))
    assert scheduler.get_num_new_matched_tokens(plain, 0) == (None, False)
    (question,) = scheduler.take_questions()
    assert question.asker == 1
    scheduler.take_answer(KVAnswer("s", 2, asker=1))
    assert scheduler.get_num_new_matched_tokens(plain, 0) == (8, True)


def said_by(index: int, *names: str, failed: bool = False) -> KVTransferResults:
    ids = frozenset(names)
    one = KVTransferResults(
        finished_recving=ids, failed_recving=ids if failed else frozenset()
    )
    parts = [KVTransferResults(), KVTransferResults()]
    parts[index] = one
    return msgspec.structs.replace(one, parts=tuple(parts))


def begin_store_load(scheduler: MultiScheduler, name: str = "s") -> KVRequest:
    plain = KVRequest(name, tuple(range(10)))
    scheduler.on_new_request(plain)
    scheduler.take_questions()
    scheduler.take_answer(KVAnswer(name, 2, asker=1))
    assert scheduler.get_num_new_matched_tokens(plain, 0) == (8, True)
    scheduler.update_state_after_alloc(plain, ((1, 2, 3),), 8)
    return plain


def test_an_end_comes_out_once() -> None:
    scheduler = make()
    scheduler.get_num_new_matched_tokens(remote(), 0)
    scheduler.update_state_after_alloc(remote(), ((1, 2, 3),), 10)
    assert scheduler.request_finished(remote(), ((1, 2, 3),)) == (True, None)
    said = said_by(0, "r", "other")
    assert scheduler.update_connector_output(said).finished_recving == {"r"}
    assert not scheduler.update_connector_output(said)


@pytest.mark.parametrize("failed", [False, True])
def test_the_end_of_one_connector_is_none_of_another(failed: bool) -> None:
    scheduler = make()
    begin_store_load(scheduler)
    assert not scheduler.update_connector_output(said_by(0, "s", failed=failed))
    believed = scheduler.update_connector_output(said_by(1, "s"))
    assert believed.finished_recving == {"s"}
    assert not believed.failed_recving


def test_a_load_of_a_used_id_waits_until_the_older_one_is_quiet() -> None:
    scheduler, plain = make(), KVRequest("r", tuple(range(10)))
    scheduler.get_num_new_matched_tokens(remote(), 0)
    scheduler.update_state_after_alloc(remote(), ((1, 2, 3),), 10)
    scheduler.request_finished(remote(), ((1, 2, 3),))
    scheduler.on_new_request(plain)
    scheduler.take_questions()
    scheduler.take_answer(KVAnswer("r", 2, asker=1))
    assert scheduler.get_num_new_matched_tokens(plain, 0) == (None, False)
    scheduler.update_connector_output(said_by(0, "r"))
    assert scheduler.get_num_new_matched_tokens(plain, 0) == (8, True)


def test_results_that_do_not_say_whose_they_are_are_refused() -> None:
    scheduler = make()
    begin_store_load(scheduler)
    ended = KVTransferResults(finished_recving=frozenset({"s"}))
    with pytest.raises(ValueError, match="parts"):
        scheduler.update_connector_output(ended)
    assert not scheduler.update_connector_output(KVTransferResults())


async def test_questions_go_to_who_asked_them() -> None:
    scheduler = make()
    scheduler.on_new_request(KVRequest("s", tuple(range(10))))
    await scheduler.start()
    (question,) = scheduler.take_questions()
    answer = await scheduler.ask(question)
    assert (answer.num_keys, answer.asker) == (0, 1)
    scheduler.set_handshake_metadata({0: KVConnectorHandshake(0, "i")})
    assert len(scheduler.statistics()) == 2
    assert scheduler.reset_cache() is None
    scheduler.shutdown()
    await scheduler.aclose()
    scheduler.abort()


def test_what_two_loads_of_one_id_hold_is_let_go_by_both() -> None:
    scheduler = make()
    plain = begin_store_load(scheduler)
    assert scheduler.request_finished(plain, ((1, 2, 3),)) == (True, None)
    scheduler.on_new_request(plain)
    assert scheduler.get_num_new_matched_tokens(plain, 0) == (None, False)
    assert scheduler.update_connector_output(said_by(1, "s")).finished_recving == {"s"}
    assert not scheduler.update_connector_output(said_by(1, "s"))


def test_a_connector_that_had_something_before_is_not_asked_to_load_it_now() -> None:
    scheduler = make()
    assert scheduler.get_num_new_matched_tokens(remote(), 0) == (10, True)
    asked = remote()
    assert scheduler.get_num_new_matched_tokens(asked, 10) == (None, False)
    scheduler.take_questions()
    scheduler.take_answer(KVAnswer("r", 0, asker=1))
    assert scheduler.get_num_new_matched_tokens(asked, 10) == (0, False)
    scheduler.update_state_after_alloc(asked, ((1, 2, 3),), 4)
    assert not scheduler.update_connector_output(said_by(0, "r")).finished_recving


def test_an_id_whose_blocks_one_connector_holds_is_loaded_by_no_other() -> None:
    scheduler = make()
    plain = begin_store_load(scheduler)
    scheduler.request_finished(plain, ((1, 2, 3),))
    assert scheduler.get_num_new_matched_tokens(remote("s"), 0) == (None, False)
    scheduler.update_connector_output(said_by(1, "s"))
    assert scheduler.get_num_new_matched_tokens(remote("s"), 0) == (10, True)
