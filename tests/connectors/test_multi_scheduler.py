from __future__ import annotations

from asynckv.abc import (
    KVAnswer,
    KVConnectorHandshake,
    KVConnectorStep,
    KVRequest,
    KVTransferResults,
)
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.multi_scheduler import MultiMetadata, MultiScheduler
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


def test_an_end_comes_out_once() -> None:
    scheduler = make()
    scheduler.get_num_new_matched_tokens(remote(), 0)
    scheduler.update_state_after_alloc(remote(), ((1, 2, 3),), 10)
    assert scheduler.request_finished(remote(), ((1, 2, 3),)) == (True, None)
    said = KVTransferResults(finished_recving=frozenset({"r", "other"}))
    assert scheduler.update_connector_output(said).finished_recving == {"r"}
    assert not scheduler.update_connector_output(said)


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
