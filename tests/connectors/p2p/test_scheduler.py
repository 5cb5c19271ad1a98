from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asynckv.abc import (
    KVConnectorHandshake,
    KVConnectorStep,
    KVRequest,
    KVScheduled,
    KVTransferResults,
    supports_hma,
)
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine, prompt_digest
from asynckv.connectors.p2p.scheduler import P2PScheduler
from asynckv.connectors.requests import P2PMetadata, P2PRequest, SaveRequest

ASKED = {"do_remote_prefill": True, "transfer_id": "t"}


def make(max_bytes: int = 300, **extra: object) -> P2PScheduler:
    config = KVTransferConfig(
        kv_buffer_size=max_bytes,
        kv_role="kv_both",
        kv_connector_extra_config={
            "direction": "pull",
            "peers": {"P": "tcp://127.0.0.1:1"},
            **extra,
        },
    )
    return P2PScheduler(config, KVEngine(engine_id="E", block_size=4, block_nbytes=100))


@pytest.fixture
def scheduler() -> P2PScheduler:
    return make()


def load(name: str = "r", **params: object) -> KVRequest:
    return KVRequest(name, tuple(range(10)), {**ASKED, **params})


def save(name: str = "r", **params: object) -> KVRequest:
    return KVRequest(name, tuple(range(10)), {"do_remote_decode": True, **params})


def orders(scheduler: P2PScheduler, *scheduled: KVScheduled) -> P2PMetadata:
    metadata = scheduler.build_connector_meta(KVConnectorStep(scheduled))
    assert isinstance(metadata, P2PMetadata)
    return metadata


def test_what_it_offers_is_what_is_not_computed_yet(scheduler: P2PScheduler) -> None:
    for _ in range(2):
        assert scheduler.get_num_new_matched_tokens(load(), 4) == (6, True)
    assert scheduler.get_num_new_matched_tokens(load(), 10) == (0, False)
    assert scheduler.get_num_new_matched_tokens(load("s", num_tokens=7), 0) == (7, True)
    assert scheduler.get_num_new_matched_tokens(KVRequest("n", (1,)), 0) == (0, False)


def test_only_the_missing_blocks_are_ordered_and_only_once(
    scheduler: P2PScheduler,
) -> None:
    for _ in range(2):
        scheduler.update_state_after_alloc(load(), ((7, 8, 9, 10),), 6)
    (order,) = orders(scheduler).loads
    assert (order.block_ids, order.first_block, order.num_tokens) == (((8, 9),), 1, 10)
    assert orders(scheduler).loads == ()
    assert scheduler.has_pending_work()
    assert scheduler.get_num_new_matched_tokens(load(), 0) == (0, False)


def test_what_is_not_needed_is_ordered_without_blocks(scheduler: P2PScheduler) -> None:
    scheduler.update_state_after_alloc(load(), ((7, 8, 9),), 0)
    (order,) = orders(scheduler).loads
    assert order.block_ids == ()
    assert (order.num_tokens, order.digest) == (10, prompt_digest(range(10), 10))
    scheduler.on_new_request(load("rejected"))
    assert scheduler.request_finished(load("rejected"), ((),)) == (False, None)
    assert [one.request_id for one in orders(scheduler).loads] == ["rejected"]


def test_an_aborted_load_holds_its_blocks_and_its_id(scheduler: P2PScheduler) -> None:
    scheduler.update_state_after_alloc(load(), ((7, 8, 9),), 10)
    assert scheduler.request_finished(load(), ((7, 8, 9),)) == (True, None)
    assert orders(scheduler).aborts == ("r",)
    assert scheduler.get_num_new_matched_tokens(load(), 0) == (None, False)
    said = KVTransferResults(finished_recving=frozenset({"r", "stranger"}))
    assert scheduler.update_connector_output(said).finished_recving == {"r"}
    assert not scheduler.update_connector_output(said)
    counted = scheduler.statistics().transfers
    assert (counted.cancelled, counted.late, counted.unknown) == (1, 1, 2)
    assert scheduler.get_num_new_matched_tokens(load(), 0) == (10, True)


def ended(scheduler: P2PScheduler, name: str, reason: str = "") -> None:
    names = frozenset({name})
    failed = names if reason else frozenset[str]()
    scheduler.update_connector_output(
        KVTransferResults(
            finished_recving=names,
            failed_recving=failed,
            reasons=dict.fromkeys(failed, reason),
        )
    )


def loading(name: str = "r") -> P2PScheduler:
    """Return a scheduler with a load of ``t`` under way, for which others wait."""
    scheduler = make()
    scheduler.update_state_after_alloc(load(name), ((7, 8, 9),), 10)
    assert len(orders(scheduler).loads) == 1
    for other in ("s", "u"):
        assert scheduler.get_num_new_matched_tokens(load(other), 0) == (None, False)
    return scheduler


def test_requests_of_one_transfer_wait_for_its_load_and_find_it_cached() -> None:
    scheduler = loading()
    ended(scheduler, "r")
    for other in ("s", "u"):
        assert scheduler.get_num_new_matched_tokens(load(other), 4) == (0, False)
        scheduler.update_state_after_alloc(load(other), ((7, 8, 9),), 0)
        scheduler.request_finished(load(other), ((7, 8, 9),))
    assert orders(scheduler) == P2PMetadata()


def test_without_a_prefix_cache_they_fail_without_asking_the_producer() -> None:
    scheduler = loading()
    ended(scheduler, "r")
    assert scheduler.get_num_new_matched_tokens(load("s"), 0) == (10, True)
    scheduler.update_state_after_alloc(load("s"), ((4, 5, 6),), 10)
    (order,) = orders(scheduler).loads
    assert "r has loaded its transfer" in order.refusal
    assert scheduler.get_num_new_matched_tokens(load("u"), 0) == (10, True)


def test_a_load_that_failed_fails_those_with_the_same_prompt() -> None:
    scheduler = loading()
    other = KVRequest("other", tuple(range(1, 11)), load().kv_transfer_params)
    assert scheduler.get_num_new_matched_tokens(other, 0) == (None, False)
    ended(scheduler, "r", "PeerLost: gone")
    for request in (load("s"), other):
        assert scheduler.get_num_new_matched_tokens(request, 0) == (10, True)
        scheduler.update_state_after_alloc(request, ((4, 5, 6),), 10)
    same, another = orders(scheduler).loads
    assert (same.refusal, another.refusal) == ("PeerLost: gone", "")


def test_an_aborted_load_is_left_to_who_waits_for_it() -> None:
    scheduler = loading()
    assert scheduler.request_finished(load(), ((7, 8, 9),)) == (True, None)
    told = orders(scheduler)
    assert told.aborts == told.left_to_others == ("r",)
    assert scheduler.get_num_new_matched_tokens(load("s"), 0) == (None, False)
    ended(scheduler, "r", "cancelled")
    assert scheduler.get_num_new_matched_tokens(load("s"), 0) == (10, True)
    scheduler.update_state_after_alloc(load("s"), ((4, 5, 6),), 10)
    assert orders(scheduler).loads[0].refusal == ""


def test_who_gives_up_waiting_releases_nothing_that_is_loaded() -> None:
    scheduler = loading()
    scheduler.request_finished(load("s"), ((),))
    assert orders(scheduler) == P2PMetadata()
    scheduler.request_finished(load(), ((7, 8, 9),))
    assert orders(scheduler).left_to_others == ("r",)
    scheduler.request_finished(load("u"), ((),))
    (order,) = orders(scheduler).loads
    assert order.block_ids == ()


def test_a_load_s_end_and_a_request_s_cost_no_look_at_others(
    scheduler: P2PScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[P2PRequest]()

    def transfer(known: P2PRequest) -> tuple[str, str]:
        looks.append(known)
        return known.peer, known.transfer_id

    monkeypatch.setattr(P2PRequest, "transfer", property(transfer))
    requests = [load(f"{number}", transfer_id=f"t{number}") for number in range(100)]
    for request in requests[:50]:
        scheduler.update_state_after_alloc(request, ((7, 8, 9),), 10)
    for request in requests[50:]:
        scheduler.on_new_request(request)
    for request in requests[:50]:
        ended(scheduler, request.request_id)
    for request in requests:
        scheduler.request_finished(request, ((),))
    assert len(looks) < 20 * len(requests)


def test_a_load_that_has_ended_is_no_reason_to_keep_its_transfer() -> None:
    scheduler = loading()
    ended(scheduler, "r", "PeerLost: gone")
    scheduler.request_finished(load("s"), ((),))
    assert orders(scheduler) == P2PMetadata()
    scheduler.request_finished(load("u"), ((),))
    assert [one.request_id for one in orders(scheduler).loads] == ["u"]


def test_a_rest_of_at_most_one_block_is_computed(scheduler: P2PScheduler) -> None:
    assert scheduler.get_num_new_matched_tokens(load(), 6) == (0, False)
    scheduler.update_state_after_alloc(load(), ((7, 8, 9),), 0)
    assert orders(scheduler).loads[0].block_ids == ()
    short = KVRequest("short", (1, 2), load().kv_transfer_params)
    assert scheduler.get_num_new_matched_tokens(short, 0) == (2, True)


def test_a_sibling_of_a_short_prompt_computes_it(scheduler: P2PScheduler) -> None:
    first, second = (KVRequest(n, (1, 2), load().kv_transfer_params) for n in "ab")
    assert scheduler.get_num_new_matched_tokens(first, 0) == (2, True)
    scheduler.update_state_after_alloc(first, ((7,),), 2)
    assert scheduler.get_num_new_matched_tokens(second, 0) == (None, False)
    said = KVTransferResults(finished_recving=frozenset({"a"}))
    scheduler.update_connector_output(said)
    assert scheduler.get_num_new_matched_tokens(second, 0) == (0, False)


def test_a_request_that_loads_nothing_does_not_take_an_id_that_is_held(
    scheduler: P2PScheduler,
) -> None:
    scheduler.update_state_after_alloc(load(), ((7, 8, 9),), 10)
    scheduler.request_finished(load(), ((7, 8, 9),))
    assert scheduler.get_num_new_matched_tokens(save(), 0) == (None, False)
    said = KVTransferResults(finished_recving=frozenset({"r"}))
    scheduler.update_connector_output(said)
    assert scheduler.get_num_new_matched_tokens(save(), 0) == (0, False)


def test_a_prompt_is_saved_by_the_step_that_completes_it(
    scheduler: P2PScheduler,
) -> None:
    scheduler.set_handshake_metadata({0: KVConnectorHandshake(0, "now")})
    scheduler.on_new_request(save())
    assert orders(scheduler, KVScheduled("r", ((1, 2),), 0, 8)).saves == ()
    (order,) = orders(scheduler, KVScheduled("r", ((1, 2, 3, 4),), 8, 2)).saves
    assert order.block_ids == ((1, 2, 3),)
    assert orders(scheduler, KVScheduled("r", ((1, 2, 3, 4),), 10, 1)).saves == ()
    is_held, params = scheduler.request_finished(save(), ((1, 2, 3, 4),))
    assert not is_held and params is not None
    assert params["transfer_id"] == order.transfer_id
    assert (params["peer"], params["num_tokens"]) == ("E", 10)
    assert params["incarnations"] == ["now"]


def test_what_decides_on_kv_beside_tokens_is_told_of_saves_and_loads(
    scheduler: P2PScheduler,
) -> None:
    told = []
    for salt in ("", "lora", "image"):
        asked = msgspec.structs.replace(load(f"l{salt}"), salt=salt)
        scheduler.update_state_after_alloc(asked, ((7, 8, 9),), 10)
        kept = msgspec.structs.replace(save(f"s{salt}"), salt=salt)
        scheduler.on_new_request(kept)
        both = orders(scheduler, KVScheduled(f"s{salt}", ((1, 2, 3),), 0, 10))
        assert both.loads[0].salt == both.saves[0].salt
        told.append(both.loads[0].salt)
    assert told[0] == b"" and len(set(told)) == 3


@pytest.mark.parametrize(("direction", "is_kept"), [("pull", False), ("push", True)])
def test_a_prompt_that_can_never_be_kept_is_not_promised(
    direction: str, is_kept: bool
) -> None:
    """Three blocks of it would have to be in the buffer here, if that is here."""
    scheduler = make(max_bytes=299, direction=direction)
    scheduler.on_new_request(save())
    (order,) = orders(scheduler, KVScheduled("r", ((1, 2, 3),), 0, 10)).saves
    assert ("10 tokens are 300 bytes" in order.refusal) is not is_kept
    promised = scheduler.request_finished(save(), ((1, 2, 3),))[1]
    assert (promised is not None) is is_kept


def test_what_could_not_be_saved_or_was_not_computed_is_not_promised(
    scheduler: P2PScheduler,
) -> None:
    scheduler.on_new_request(save())
    orders(scheduler, KVScheduled("r", ((1, 2, 3),), 0, 10))
    lost = frozenset({"r"})
    scheduler.update_connector_output(
        KVTransferResults(finished_sending=lost, failed_sending=lost)
    )
    assert scheduler.request_finished(save(), ((),)) == (False, None)
    scheduler.on_new_request(save("early"))
    assert scheduler.request_finished(save("early"), ((),)) == (False, None)


NONSENSE: list[dict[Any, Any]] = [
    {"transfer_id": ""},
    {"transfer_id": "x" * 300},
    {"transfer_id": 7},
    {"transfer_id": "\ud800"},
    {"transfer_id": "a\nb"},
    {"peer": "\udfff"},
    {"incarnations": ["\ud800"]},
    {"incarnations": ["x" * 300]},
    {"incarnations": ["x"] * 1025},
    {"num_tokens": float("nan")},
    {7: 7},
    {"peer": "tcp://169.254.169.254:80"},
    {"shape": {"layout": {"axes": "LKBNH"}, "block_size": -1, "key_nbytes": 1}},
    {"num_tokens": "many"},
]


@pytest.mark.parametrize(
    "params",
    [
        *({**ASKED, **params} for params in NONSENSE),
        *("text", 7, ["a", "list"], {1: "one"}),
    ],
)
def test_parameters_from_outside_that_make_no_sense_load_nothing(params: Any) -> None:
    scheduler, request = make(), KVRequest("r", tuple(range(10)), params)
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.update_state_after_alloc(request, ((7, 8, 9),), 0)
    assert scheduler.statistics().refused_params == 1
    assert msgspec.msgpack.encode(orders(scheduler))
    assert orders(scheduler).loads == ()


@pytest.mark.parametrize(
    ("direction", "is_full", "is_kept"),
    [("pull", True, False), ("pull", False, True), ("push", True, True)],
)
def test_an_engine_that_has_no_room_promises_nothing_more_for_now(
    direction: str, is_full: bool, is_kept: bool
) -> None:
    """That a save failed for any other reason says nothing of the next one."""
    scheduler = make(direction=direction)
    scheduler.on_new_request(save())
    orders(scheduler, KVScheduled("r", ((1, 2, 3),), 0, 10))
    lost = frozenset({"r"})
    full = lost if is_full else frozenset[str]()
    scheduler.update_connector_output(KVTransferResults(lost, lost, full_sending=full))
    scheduler.on_new_request(save("s"))
    (order,) = orders(scheduler, KVScheduled("s", ((4, 5, 6),), 0, 10)).saves
    assert ("is full" in order.refusal, order.is_named) == (not is_kept, False)
    promised = scheduler.request_finished(save("s"), ((4, 5, 6),))[1]
    assert (promised is not None) is is_kept


def test_of_several_peers_one_must_be_named() -> None:
    two = {"P": "tcp://127.0.0.1:1", "Q": "tcp://127.0.0.1:2"}
    scheduler = make(peers=two)
    assert scheduler.get_num_new_matched_tokens(load(), 0) == (0, False)
    named = load("s", peer="Q")
    assert scheduler.get_num_new_matched_tokens(named, 0) == (10, True)


def test_hybrid_models_have_a_list_of_blocks_a_group(scheduler: P2PScheduler) -> None:
    assert supports_hma(scheduler)
    scheduler.update_state_after_alloc(load(), ((7, 8, 9), (1, 2, 3)), 6)
    assert orders(scheduler).loads[0].block_ids == ((8, 9), (2, 3))
    assert scheduler.request_finished_all_groups(load(), ((7,), (1,))) == (True, None)
    scheduler.shutdown()
    assert orders(scheduler).aborts == ()


def test_a_push_that_makes_no_sense_is_none() -> None:
    scheduler = make(direction="push")
    for number, params in enumerate(({"transfer_id": "\ud800"}, {"peer": "\ud800"})):
        name = f"r{number}"
        scheduler.on_new_request(save(name, **params))
        assert orders(scheduler, KVScheduled(name, ((1, 2, 3),), 0, 10)).saves == ()
    assert scheduler.statistics().refused_params == 2


def test_a_prompt_without_its_last_token_is_not_saved(scheduler: P2PScheduler) -> None:
    scheduler.on_new_request(save())
    assert orders(scheduler, KVScheduled("r", ((1, 2, 3),), 0, 9)).saves == ()
    assert scheduler.request_finished(save("x"), ((),)) == (False, None)
    assert len(orders(scheduler, KVScheduled("r", ((1, 2, 3),), 9, 1)).saves) == 1


@pytest.mark.parametrize("named", [dict[str, str](), {"transfer_id": "t"}])
def test_what_an_aborted_request_saved_is_withdrawn_unless_it_may_be_known(
    named: dict[str, str],
) -> None:
    scheduler, request = make(), save("r", **named)
    scheduler.on_new_request(request)
    (order,) = orders(scheduler, KVScheduled("r", ((1, 2, 3),), 0, 10)).saves
    aborted = msgspec.structs.replace(request, is_aborted=True)
    assert scheduler.request_finished(aborted, ((1, 2, 3),)) == (False, None)
    assert scheduler.has_pending_work() is not bool(named)
    withdrawn = [one.transfer_id for one in orders(scheduler).withdrawals]
    assert withdrawn == ([] if named else [order.transfer_id])
    assert not orders(scheduler).withdrawals


def test_an_aborted_request_that_saved_nothing_withdraws_nothing(
    scheduler: P2PScheduler,
) -> None:
    scheduler.on_new_request(save())
    aborted = msgspec.structs.replace(save(), is_aborted=True)
    assert scheduler.request_finished(aborted, ((1, 2, 3),)) == (False, None)
    assert not scheduler.has_pending_work()


def sampled(scheduler: P2PScheduler) -> tuple[KVRequest, KVRequest, SaveRequest]:
    """Return two samples whose prompt the first has saved, and how."""
    first, second = (
        msgspec.structs.replace(save(f"{number}_a"), parent_id="a") for number in (0, 1)
    )
    for request in (first, second):
        scheduler.on_new_request(request)
    steps = [KVScheduled(f"{number}_a", ((1, 2, 3),), 0, 10) for number in (0, 1)]
    (order,) = orders(scheduler, *steps).saves
    return first, second, order


def test_samples_of_a_prompt_are_saved_once_and_all_promise_that(
    scheduler: P2PScheduler,
) -> None:
    first, second, order = sampled(scheduler)
    for request in (first, second):
        _, params = scheduler.request_finished(request, ((1, 2, 3),))
        assert params is not None and params["transfer_id"] == order.transfer_id
    assert order.request_id == "0_a" and not scheduler.has_pending_work()


def test_no_sample_promises_what_another_could_not_save(
    scheduler: P2PScheduler,
) -> None:
    first, second, _ = sampled(scheduler)
    assert scheduler.request_finished(first, ((1, 2, 3),))[1] is not None
    lost = frozenset({"0_a"})
    scheduler.update_connector_output(
        KVTransferResults(finished_sending=lost, failed_sending=lost)
    )
    assert scheduler.request_finished(second, ((1, 2, 3),)) == (False, None)


@pytest.mark.parametrize("aborted", [(True, True), (True, False), (False, True)])
def test_what_samples_share_is_withdrawn_when_all_are_aborted(
    scheduler: P2PScheduler, aborted: tuple[bool, bool]
) -> None:
    first, second, order = sampled(scheduler)
    for request, is_aborted in zip((first, second), aborted, strict=True):
        ended = msgspec.structs.replace(request, is_aborted=is_aborted)
        scheduler.request_finished(ended, ((1, 2, 3),))
    withdrawn = [one.transfer_id for one in orders(scheduler).withdrawals]
    assert withdrawn == ([order.transfer_id] if all(aborted) else [])


def test_a_group_with_fewer_blocks_than_are_to_be_loaded_is_refused(
    scheduler: P2PScheduler,
) -> None:
    scheduler.update_state_after_alloc(load(), ((7, 8, 9), (1, 2)), 6)
    (order,) = orders(scheduler).loads
    assert "a group has 1 blocks for the 2" in order.refusal
