from __future__ import annotations

import asyncio
import contextlib
import time
import types
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from asynckv.abc import (
    KVAnswer,
    KVConnectorStep,
    KVRequest,
    KVScheduled,
    KVTransferResults,
)
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import (
    KVEngine,
    StoredShape,
    namespace_of,
    rank_block_keys,
)
from asynckv.connectors.requests import StoreMetadata
from asynckv.connectors.store import (
    lookup as store_lookup,
    scheduler as store_scheduler,
)
from asynckv.connectors.store.scheduler import StoreScheduler
from asynckv.testing.blocked import until
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import toy_shape

REQUEST = KVRequest("r", tuple(range(10)))
ENGINE = KVEngine(engine_id="E", block_size=4, tp_size=2)


def make(chunk_tokens: int = 4, url: str = "mem://no-such-store") -> StoreScheduler:
    config = KVTransferConfig(
        kv_role="kv_both",
        kv_connector_extra_config={
            "store": url,
            "fingerprint": "toy",
            "chunk_tokens": chunk_tokens,
        },
    )
    return StoreScheduler(config, ENGINE)


@pytest.fixture
def scheduler() -> StoreScheduler:
    return make()


@contextlib.asynccontextmanager
async def storing(
    chunk_tokens: int = 4,
) -> AsyncIterator[tuple[StoreScheduler, StoreBuffer]]:
    config = KVTransferConfig(
        kv_role="kv_both",
        kv_connector_extra_config={"chunk_tokens": chunk_tokens},
    )
    async with StoreBuffer("2MiB") as store:
        async with StoreScheduler(config, ENGINE, store) as scheduler:
            yield scheduler, store


async def put(store: StoreBuffer, keys: tuple[str, ...]) -> None:
    for rank in range(2):
        for key in rank_block_keys(keys, namespace_of(ENGINE), rank):
            await store.put(key, torch.zeros(2**16, dtype=torch.uint8))


async def find(
    scheduler: StoreScheduler, store: StoreBuffer, count: int
) -> tuple[str, ...]:
    """Let the store have so many chunks of what is asked for, and say so."""
    (question,) = scheduler.take_questions()
    await put(store, question.keys[:count])
    scheduler.take_answer(await scheduler.ask(question))
    return question.keys


def orders(scheduler: StoreScheduler, *scheduled: KVScheduled) -> StoreMetadata:
    metadata = scheduler.build_connector_meta(KVConnectorStep(scheduled))
    assert isinstance(metadata, StoreMetadata)
    return metadata


def loading() -> StoreScheduler:
    """Return a scheduler that loads two blocks of the request."""
    scheduler = make()
    scheduler.on_new_request(REQUEST)
    scheduler.take_answer(KVAnswer("r", 2))
    scheduler.update_state_after_alloc(REQUEST, ((7, 8, 9),), 8)
    return scheduler


async def test_until_its_question_is_answered_a_request_is_ask_again() -> None:
    async with storing() as (scheduler, store):
        for _ in range(2):
            assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (None, False)
        (question,) = scheduler.take_questions()
        assert len(question.keys) == 2
        assert scheduler.take_questions() == ()
        scheduler.take_answer(KVAnswer("stranger", 7))
        await put(store, question.keys)
        await scheduler.ask(question)
        scheduler.take_answer(question.answered(99))
        assert scheduler.get_num_new_matched_tokens(REQUEST, 4) == (4, True)
        assert scheduler.get_num_new_matched_tokens(REQUEST, 8) == (0, False)


def test_what_was_never_found_is_not_believed(scheduler: StoreScheduler) -> None:
    scheduler.on_new_request(REQUEST)
    scheduler.take_answer(KVAnswer("r", 2))
    assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (None, False)


def test_who_has_its_blocks_waits_for_no_answer(scheduler: StoreScheduler) -> None:
    scheduler.on_new_request(REQUEST)
    scheduler.update_state_after_alloc(REQUEST, ((7, 8, 9),), 0)
    assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (0, False)


async def test_an_answer_to_an_older_request_of_the_same_id_says_nothing() -> None:
    async with storing() as (scheduler, store):
        scheduler.on_new_request(REQUEST)
        (old,) = scheduler.take_questions()
        scheduler.request_finished(REQUEST, ())
        scheduler.on_new_request(REQUEST)
        scheduler.take_answer(old.answered(2))
        assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (None, False)
        await find(scheduler, store, 1)
        assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (4, True)


async def test_a_store_that_is_not_there_has_nothing(scheduler: StoreScheduler) -> None:
    await scheduler.start()
    scheduler.on_new_request(REQUEST)
    (question,) = scheduler.take_questions()
    assert (await scheduler.ask(question)).num_keys == 0
    assert scheduler.statistics().unanswered == 1
    scheduler.abort()


def test_what_is_stored_is_loaded_and_the_rest_is_saved_once(
    scheduler: StoreScheduler,
) -> None:
    scheduler.on_new_request(REQUEST)
    scheduler.take_answer(KVAnswer("r", 1))
    scheduler.update_state_after_alloc(REQUEST, ((7, 8, 9),), 4)
    keys = scheduler.take_questions()[0].keys
    (load,) = orders(scheduler).loads
    assert (load.keys, load.block_ids) == (keys[:1], ((7,),))
    scheduled = KVScheduled("r", ((7, 8, 9),), 4, 6)
    (save,) = orders(scheduler, scheduled).saves
    assert (save.keys, save.block_ids) == (keys[1:], ((8,),))
    assert save.first_block == 1
    assert orders(scheduler, scheduled).saves == ()
    assert scheduler.has_pending_work()


LONG = KVRequest("r", tuple(range(75)))
BLOCKS = tuple(range(100, 119))


@pytest.mark.parametrize(
    ("chunk_tokens", "chunks"), [(4, 18), (8, 9), (64, 1), (72, 1), (76, 0), (128, 0)]
)
def test_whole_chunks_of_a_prompt_are_looked_up_and_saved_and_no_more(
    chunk_tokens: int, chunks: int
) -> None:
    scheduler = make(chunk_tokens)
    scheduler.on_new_request(LONG)
    asked = [key for one in scheduler.take_questions() for key in one.keys]
    assert len(asked) == chunks
    scheduler.take_answer(KVAnswer("r", 0))
    saves = orders(scheduler, KVScheduled("r", (BLOCKS,), 0, 75)).saves
    assert [key for save in saves for key in save.keys] == asked
    saved = [block for save in saves for block in save.block_ids[0]]
    assert saved == list(BLOCKS[: chunks * chunk_tokens // 4])


def test_a_chunk_is_saved_once_by_the_step_that_completes_it() -> None:
    scheduler = make(32)
    scheduler.on_new_request(LONG)
    scheduler.take_answer(KVAnswer("r", 0))
    saved = [
        [(save.first_block, *save.block_ids) for save in orders(scheduler, part).saves]
        for before, count in ((0, 31), (31, 1), (32, 8), (40, 23), (63, 12))
        for part in [KVScheduled("r", (BLOCKS,), before, count)]
    ]
    assert saved == [[], [(0, BLOCKS[:8])], [], [], [(8, BLOCKS[8:16])]]


@pytest.mark.parametrize(
    ("computed", "first", "num_keys"),
    [(0, 0, 2), (4, 1, 2), (28, 7, 2), (32, 8, 1), (36, 9, 1), (60, 15, 1)],
)
async def test_of_a_chunk_that_the_engine_has_begun_the_other_blocks_are_loaded(
    computed: int, first: int, num_keys: int
) -> None:
    async with storing(32) as (scheduler, store):
        scheduler.on_new_request(LONG)
        keys = await find(scheduler, store, 2)
        missing = 64 - computed
        assert scheduler.get_num_new_matched_tokens(LONG, computed) == (missing, True)
        scheduler.update_state_after_alloc(LONG, (BLOCKS,), missing)
        (load,) = orders(scheduler).loads
        assert load.keys == keys[-num_keys:]
        assert (load.first_block, load.block_ids) == (first, (BLOCKS[first:16],))
        assert not load.refusal and len(list(load.parts(8))) == num_keys


async def test_what_the_engine_has_of_all_stored_chunks_is_not_loaded() -> None:
    async with storing(32) as (scheduler, store):
        scheduler.on_new_request(LONG)
        await find(scheduler, store, 2)
        for computed in (64, 68):
            assert scheduler.get_num_new_matched_tokens(LONG, computed) == (0, False)
        assert scheduler.statistics().hit_blocks == 16


def test_chunks_of_another_size_have_other_keys() -> None:
    asked: set[str] = set()
    sizes = (4, 8, 32)
    for scheduler in map(make, sizes):
        scheduler.on_new_request(LONG)
        asked.update(scheduler.take_questions()[0].keys)
    assert len(asked) == sum(75 // size for size in sizes)


def test_a_group_with_fewer_blocks_than_are_to_be_loaded_is_refused(
    scheduler: StoreScheduler,
) -> None:
    scheduler.on_new_request(REQUEST)
    scheduler.take_answer(KVAnswer("r", 2))
    scheduler.update_state_after_alloc(REQUEST, ((7, 8, 9), (1,)), 8)
    (load,) = orders(scheduler).loads
    assert "a group has 1 blocks for the 2" in load.refusal


def test_an_aborted_load_holds_its_blocks() -> None:
    scheduler = loading()
    assert scheduler.request_finished_all_groups(REQUEST, ((7, 8, 9),)) == (True, None)
    assert orders(scheduler).aborts == ("r",)
    said = KVTransferResults(finished_recving=frozenset({"r"}))
    assert scheduler.update_connector_output(said).failed_recving == {"r"}
    assert not scheduler.has_pending_work()
    scheduler.shutdown()


def test_a_request_that_loads_nothing_does_not_take_an_id_that_is_held() -> None:
    scheduler, short = loading(), KVRequest("r", (1,))
    scheduler.request_finished(REQUEST, ((7, 8, 9),))
    assert scheduler.get_num_new_matched_tokens(short, 0) == (None, False)
    said = KVTransferResults(finished_recving=frozenset({"r"}))
    scheduler.update_connector_output(said)
    assert scheduler.get_num_new_matched_tokens(short, 0) == (0, False)


def test_what_failed_to_load_is_saved_again_when_it_is_computed() -> None:
    scheduler = loading()
    lost = frozenset({"r"})
    scheduler.update_connector_output(
        KVTransferResults(finished_recving=lost, failed_recving=lost)
    )
    (save,) = orders(scheduler, KVScheduled("r", ((7, 8, 9),), 0, 10)).saves
    assert save.block_ids == ((7, 8),)
    assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (0, False)


async def test_an_old_answer_is_asked_for_again_but_not_for_ever_and_never_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    clock = types.SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr(store_scheduler, "time", clock)
    async with storing() as (scheduler, store):
        scheduler.on_new_request(REQUEST)
        for asked in range(8):
            await find(scheduler, store, 2)
            assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (8, True)
            now_s += 60
            again = scheduler.get_num_new_matched_tokens(REQUEST, 0)
            assert again == ((None, False) if asked < 7 else (0, False))
        assert not scheduler.take_questions()


async def test_what_had_to_be_let_go_for_others_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_lookup, "_MOST_HELD", 2)
    requests = [KVRequest(name, (*range(8), ord(name))) for name in "abc"]
    async with storing() as (scheduler, store):
        for request in requests:
            scheduler.on_new_request(request)
        questions = scheduler.take_questions()
        await put(store, questions[0].keys)
        for question in questions:
            scheduler.take_answer(await scheduler.ask(question))
        said = [scheduler.get_num_new_matched_tokens(one, 0) for one in requests]
        assert said == [(None, False), (8, True), (8, True)]
        scheduler.take_answer(await scheduler.ask(*scheduler.take_questions()))
        assert scheduler.get_num_new_matched_tokens(requests[0], 0) == (8, True)


def test_a_block_is_stored_once_all_of_it_is_computed(
    scheduler: StoreScheduler,
) -> None:
    scheduler.on_new_request(REQUEST)
    scheduler.take_answer(KVAnswer("r", 0))
    saved = [
        [save.block_ids for save in orders(scheduler, part).saves]
        for before, count in ((0, 3), (3, 3), (6, 1), (7, 1), (8, 2))
        for part in [KVScheduled("r", ((7, 8, 9),), before, count)]
    ]
    assert saved == [[], [((7,),)], [], [((8,),)], []]


def test_an_answer_counts_once_and_each_question_is_another(
    scheduler: StoreScheduler,
) -> None:
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
    scheduler = loading()
    scheduler.on_new_request(KVRequest("s", tuple(range(10))))
    scheduler.request_finished(REQUEST, ((7, 8, 9),))
    scheduler.shutdown()
    assert scheduler.statistics().requests == 0
    assert not scheduler.take_questions()
    metadata = orders(scheduler)
    assert (metadata.loads, metadata.aborts) == ((), ())


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


def load_it(scheduler: StoreScheduler, answer: KVAnswer) -> None:
    scheduler.take_answer(answer)
    scheduler.update_state_after_alloc(REQUEST, ((7, 8, 9),), 8)
    said = KVTransferResults(finished_recving=frozenset({"r"}))
    scheduler.update_connector_output(said)


def end_it(scheduler: StoreScheduler, answer: KVAnswer) -> None:
    scheduler.take_answer(answer)
    scheduler.request_finished(REQUEST, ())


def end_it_before(scheduler: StoreScheduler, answer: KVAnswer) -> None:
    scheduler.request_finished(REQUEST, ())
    scheduler.take_answer(answer)


@pytest.mark.parametrize("what", [load_it, end_it, end_it_before])
async def test_what_was_found_is_held_no_longer_than_it_is_needed(
    what: Callable[[StoreScheduler, KVAnswer], None],
) -> None:
    async with storing() as (asking, store):
        asking.on_new_request(REQUEST)
        (question,) = asking.take_questions()
        await put(store, question.keys)
        answer = await asking.ask(question)
        assert (answer.num_keys, len(asking.finder.holds)) == (2, 1)
        what(asking, answer)
        await until(lambda: not len(asking.finder.holds))


@contextlib.asynccontextmanager
async def found(scheduler: StoreScheduler) -> AsyncIterator[KVAnswer]:
    """Let a store that is served have all of the request, and return what it says."""
    async with StoreBuffer(fingerprint="toy") as store:
        async with serve("mem://no-such-store", store=store):
            scheduler.on_new_request(REQUEST)
            (question,) = scheduler.take_questions()
            await put(store, question.keys)
            yield await scheduler.ask(question)
    await until(lambda: scheduler.finder.line.connected is None)


@pytest.mark.parametrize("taken", ["before", "after"])
async def test_what_was_found_at_a_store_that_is_gone_is_not_believed(
    scheduler: StoreScheduler, taken: str
) -> None:
    async with found(scheduler) as answer:
        if taken == "before":
            scheduler.take_answer(answer)
            assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (8, True)
    scheduler.take_answer(answer)
    assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (None, False)
    scheduler.take_answer(await scheduler.ask(*scheduler.take_questions()))
    assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (0, False)
    await scheduler.aclose()


@pytest.mark.parametrize("turns", range(5))
async def test_what_a_store_found_that_died_as_it_answered_is_not_believed(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        StoreBuffer(fingerprint="toy") as store,
        serve("tcp://127.0.0.1:0", store=store) as server,
    ):
        scheduler, hold = make(url=server.url), store.values.hold
        await scheduler.start()
        await until(lambda: scheduler.finder.line.is_reachable)
        scheduler.on_new_request(REQUEST)
        (question,) = scheduler.take_questions()
        await put(store, question.keys)

        def die_later(turns: int) -> None:
            if turns:
                asyncio.get_running_loop().call_soon(die_later, turns - 1)
            else:
                server.abort()

        def hold_and_die(*args: Any, **options: Any) -> Any:
            die_later(turns)
            return hold(*args, **options)

        monkeypatch.setattr(store.values, "hold", hold_and_die)
        scheduler.take_answer(await scheduler.ask(question))
        await until(lambda: scheduler.finder.line.connected is None)
        said = scheduler.get_num_new_matched_tokens(REQUEST, 0)
        assert said in ((None, False), (0, False))
        await scheduler.aclose()


async def test_an_answer_is_as_old_as_what_was_found_whenever_it_is_taken(
    scheduler: StoreScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with found(scheduler) as answer:
        clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + 60)
        monkeypatch.setattr(store_scheduler, "time", clock)
        scheduler.take_answer(answer)
        assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (None, False)
        await scheduler.aclose()


MODEL = ToyModel()


def engine(tp_size: int = 1, block_size: int = 16, heads: int = 4) -> KVEngine:
    shape = toy_shape(ToyModel(heads=heads), tp_size=tp_size, block_size=block_size)
    return KVEngine(engine_id="E", block_size=block_size, tp_size=tp_size, shape=shape)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (engine(), ""),
        (engine(2), "tp_size=2 there and 1 here"),
        (engine(2, 32), "tp_size=2 there and 1 here, block_size=32 there and 16 here"),
        (engine(heads=8), "heads, layers or layout are others"),
    ],
)
def test_it_is_said_in_what_engines_differ(other: KVEngine, difference: str) -> None:
    stored = StoredShape.read(StoredShape.of(other, 64).tensor())
    ours = StoredShape.of(engine(), 64)
    assert stored is not None and stored.differs_from(ours) == difference
    assert (namespace_of(other) == namespace_of(engine())) == (not difference)


def test_an_older_engine_s_values_are_said_to_be_of_one_block() -> None:
    said = StoredShape.of(engine(), 0).differs_from(StoredShape.of(engine(), 64))
    assert said == "chunk_tokens=one block there and 64 here"


def test_engines_of_other_blocks_have_no_key_in_common() -> None:
    one, other = (KVEngine(engine_id="E", block_size=size) for size in (16, 32))
    assert namespace_of(one) != namespace_of(other)


@pytest.mark.parametrize(
    "value",
    [
        None,
        torch.zeros(4),
        torch.zeros(4, dtype=torch.uint8),
        torch.zeros(2**17, dtype=torch.uint8),
    ],
)
def test_what_says_nothing_is_nothing(value: torch.Tensor | None) -> None:
    assert StoredShape.read(value) is None
