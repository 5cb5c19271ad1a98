from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import torch

from asynckv.abc import (
    KVAnswer,
    KVConnectorStep,
    KVRequest,
    KVScheduled,
    KVTransferResults,
    PrefixMatch,
)
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import (
    SHAPE_KEY,
    KVEngine,
    StoredShape,
    namespace_of,
    prefix_block_keys,
    rank_block_keys,
)
from asynckv.connectors.requests import StoreMetadata
from asynckv.connectors.store.scheduler import PrefixLookup, StorePins, StoreScheduler
from asynckv.errors import PeerLost
from asynckv.testing.blocked import until
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import toy_shape

REQUEST = KVRequest("r", tuple(range(10)))
ENGINE = KVEngine(engine_id="E", block_size=4, tp_size=2)


def make(chunk_tokens: int = 4) -> StoreScheduler:
    config = KVTransferConfig(
        kv_role="kv_both",
        kv_connector_extra_config={
            "store": "mem://no-such-store",
            "fingerprint": "toy",
            "chunk_tokens": chunk_tokens,
        },
    )
    return StoreScheduler(config, ENGINE)


@pytest.fixture
def scheduler() -> StoreScheduler:
    return make()


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


def test_until_its_question_is_answered_a_request_is_ask_again(
    scheduler: StoreScheduler,
) -> None:
    for _ in range(2):
        assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (None, False)
    (question,) = scheduler.take_questions()
    assert len(question.keys) == 2
    assert scheduler.take_questions() == ()
    scheduler.take_answer(KVAnswer("stranger", 7))
    scheduler.take_answer(KVAnswer("r", 99))
    assert scheduler.get_num_new_matched_tokens(REQUEST, 4) == (4, True)
    assert scheduler.get_num_new_matched_tokens(REQUEST, 8) == (0, False)


def test_an_answer_to_an_older_request_of_the_same_id_says_nothing(
    scheduler: StoreScheduler,
) -> None:
    scheduler.on_new_request(REQUEST)
    (old,) = scheduler.take_questions()
    scheduler.request_finished(REQUEST, ())
    scheduler.on_new_request(REQUEST)
    (question,) = scheduler.take_questions()
    scheduler.take_answer(old.answered(2))
    assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (None, False)
    scheduler.take_answer(question.answered(1))
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
def test_of_a_chunk_that_the_engine_has_begun_the_other_blocks_are_loaded(
    computed: int, first: int, num_keys: int
) -> None:
    scheduler = make(32)
    scheduler.on_new_request(LONG)
    (question,) = scheduler.take_questions()
    scheduler.take_answer(question.answered(2))
    missing = 64 - computed
    assert scheduler.get_num_new_matched_tokens(LONG, computed) == (missing, True)
    scheduler.update_state_after_alloc(LONG, (BLOCKS,), missing)
    (load,) = orders(scheduler).loads
    assert load.keys == question.keys[-num_keys:]
    assert (load.first_block, load.block_ids) == (first, (BLOCKS[first:16],))
    assert not load.refusal and len(list(load.parts(8))) == num_keys


def test_what_the_engine_has_of_all_chunks_that_are_stored_is_not_loaded() -> None:
    scheduler = make(32)
    scheduler.on_new_request(LONG)
    scheduler.take_answer(KVAnswer("r", 2))
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


def test_an_old_answer_is_asked_for_again_but_not_for_ever_and_never_believed(
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
        assert again == ((None, False) if asked < 8 else (0, False))
    assert asked == 8


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


class StalledStore(StoreBuffer):
    """Answers when it is told that it may."""

    def __init__(self) -> None:
        super().__init__("1MiB")
        self.goes_on = asyncio.Event()
        self.asked = 0

    async def contains(self, keys: Sequence[str]) -> tuple[bool, ...]:
        self.asked += 1
        await self.goes_on.wait()
        return await super().contains(keys)

    async def match_prefix(self, block_keys: Sequence[str]) -> PrefixMatch:
        self.asked += 1
        await self.goes_on.wait()
        return await super().match_prefix(block_keys)


KEYS = prefix_block_keys(range(10), ENGINE.block_size)


@contextlib.asynccontextmanager
async def finding() -> AsyncIterator[tuple[PrefixLookup, StoreBuffer]]:
    async with StoreBuffer("1MiB") as store:
        extra: dict[str, object] = {"chunk_tokens": 4}
        config = KVTransferConfig(kv_connector_extra_config=extra)
        finder = PrefixLookup(config, ENGINE, store)
        try:
            yield finder, store
        finally:
            await finder.aclose()


def keys_of(rank: int, count: int) -> list[str]:
    return rank_block_keys(KEYS[:count], namespace_of(ENGINE), rank)


async def test_a_block_is_there_when_every_rank_s_part_is() -> None:
    async with finding() as (finder, store):
        assert await finder.find(KEYS) == 0
        for key in (*keys_of(0, 2), *keys_of(1, 1)):
            await store.put(key, torch.ones(1))
        assert await finder.find(KEYS) == 1


async def test_blocks_of_an_engine_that_is_cut_otherwise_are_refused_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with finding() as (finder, store):
        other = KVEngine(engine_id="O", block_size=8, tp_size=2)
        await store.put(SHAPE_KEY, StoredShape.of(other, 32).tensor())
        for _ in range(2):
            assert await finder.find(KEYS) == 0
        said = "block_size=8 there and 4 here, chunk_tokens=32 there and 4 here"
        assert finder.refused == said
        assert len(caplog.messages) == 1 and said in caplog.text


async def test_what_was_found_stays_until_its_load_can_begin() -> None:
    async with finding() as (finder, store):
        for key in (*keys_of(0, 2), *keys_of(1, 2)):
            await store.put(key, torch.zeros(2**16, dtype=torch.uint8))
        assert await finder.find(KEYS) == 2
        for number in range(40):
            filler = torch.zeros(2**16, dtype=torch.uint8)
            await store.put(f"filler {number}", filler)
        assert await finder.find(KEYS) == 2


async def test_what_is_not_needed_is_let_go_although_nobody_asks_again() -> None:
    async with finding() as (finder, store):
        for key in (*keys_of(0, 1), *keys_of(1, 1)):
            await store.put(key, torch.zeros(2**16, dtype=torch.uint8))
        assert await finder.find(KEYS, 7) == 1
        finder.let_go(7)
        await until(lambda: not len(finder.holds))
        await fill(store)
        assert await finder.find(KEYS) == 0


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
    extra: dict[str, object] = {"chunk_tokens": 4}
    config = KVTransferConfig(kv_role="kv_both", kv_connector_extra_config=extra)
    async with StoreBuffer() as store, StoreScheduler(config, ENGINE, store) as asking:
        for key in (*keys_of(0, 2), *keys_of(1, 2)):
            await store.put(key, torch.ones(1))
        asking.on_new_request(REQUEST)
        answer = await asking.ask(*asking.take_questions())
        assert (answer.num_keys, len(asking.finder.holds)) == (2, 1)
        what(asking, answer)
        await until(lambda: not len(asking.finder.holds))


async def test_what_was_found_at_a_store_that_is_gone_is_not_believed(
    scheduler: StoreScheduler,
) -> None:
    async with StoreBuffer(fingerprint="toy") as store:
        async with serve("mem://no-such-store", store=store):
            scheduler.on_new_request(REQUEST)
            (question,) = scheduler.take_questions()
            for rank in range(2):
                for key in rank_block_keys(question.keys, namespace_of(ENGINE), rank):
                    await store.put(key, torch.ones(1))
            scheduler.take_answer(await scheduler.ask(question))
            assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (8, True)
        await until(lambda: scheduler.finder.line.link is None)
        assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (None, False)
        scheduler.take_answer(await scheduler.ask(*scheduler.take_questions()))
        assert scheduler.get_num_new_matched_tokens(REQUEST, 0) == (0, False)
    await scheduler.aclose()


async def test_a_silent_store_is_waited_for_once_until_it_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with StalledStore() as store:
        config = KVTransferConfig(kv_connector_extra_config={"lookup_timeout_s": 0.01})
        finder = PrefixLookup(config, ENGINE, store)
        with pytest.raises(TimeoutError):
            await finder.find(KEYS)
        for _ in range(3):
            with pytest.raises(PeerLost, match="has been silent"):
                await finder.find(KEYS)
        await until(lambda: store.asked == 2)  # and once beside all lookups
        assert not finder.line.is_reachable
        store.goes_on.set()
        await until(lambda: finder.line.is_reachable)
        assert await finder.find(KEYS) == 0
        lost, back = caplog.messages
        assert "no answer within 0.01 s (lookup_timeout_s)" in lost
        assert "answers again" in back
        await finder.aclose()


async def test_a_store_that_dies_and_comes_back_is_logged_once_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "asynckv.connectors")
    extra: dict[str, object] = {"store": "mem://mortal", "fingerprint": "toy"}
    finder = PrefixLookup(
        KVTransferConfig(kv_connector_extra_config=extra), ENGINE, None
    )
    for _ in range(2):
        with pytest.raises(PeerLost):
            await finder.find(KEYS)
    async with StoreBuffer() as store, serve("mem://mortal", store=store):
        assert await finder.find(KEYS) == 0  # at once: it was not silent
    with pytest.raises(PeerLost):
        await finder.find(KEYS)
    await finder.aclose()
    assert [" lost " in f" {line}" for line in caplog.messages] == [True, False, True]
    assert "mem://mortal: nobody serves" in caplog.messages[0]


async def test_the_store_is_dialled_before_the_first_prompt() -> None:
    extra: dict[str, object] = {"store": "mem://early", "fingerprint": "toy"}
    finder = PrefixLookup(
        KVTransferConfig(kv_connector_extra_config=extra), ENGINE, None
    )
    async with StoreBuffer() as store, serve("mem://early", store=store):
        finder.start()
        await until(lambda: finder.line.is_reachable)
        await finder.aclose()


async def fill(store: StoreBuffer) -> None:
    """Put so much that all that can be dropped is."""
    for number in range(40):
        await store.put(f"filler {number}", torch.zeros(2**17, dtype=torch.uint8))


async def test_what_is_held_is_not_evicted_and_what_is_let_go_is() -> None:
    holds = StorePins(3600, 8)
    async with StoreBuffer("2MiB") as store:
        await store.put("a", torch.zeros(2**17, dtype=torch.uint8))
        assert await holds.hold(store, ["a", "b"], 1.0, 0) == (True, False)
        await fill(store)
        assert await store.contains(["a"]) == (True,)
        await holds.release()
        await fill(store)
        assert await store.contains(["a"]) == (False,)
        assert await holds.hold(store, ["a"], 1.0, 1) == (False,)
        await holds.aclose()
        assert not len(holds)
        with pytest.raises(PeerLost):
            await holds.hold(store, ["a"], 1.0, 1)


async def test_of_a_burst_it_holds_the_last_and_all_of_it_is_answered() -> None:
    holds = StorePins(3600, 2)
    async with StoreBuffer("2MiB") as store:
        for key in ("a", "b", "c", "d"):
            await store.put(key, torch.zeros(2**17, dtype=torch.uint8))
        answers = await asyncio.gather(
            *(holds.hold(store, [key], 1.0, ord(key)) for key in "abcd")
        )
        assert answers == [(True,)] * 4
        await fill(store)
        assert await store.contains(["a", "b", "c", "d"]) == (False, False, True, True)
        await holds.aclose()


async def test_what_is_asked_while_it_closes_is_not_held() -> None:
    holds = StorePins(3600, 2)
    async with StoreBuffer() as store:
        await holds.hold(store, ["a"], 1.0, 1)
        holds.abort()  # what is held ends soon, and has not yet
        with pytest.raises(PeerLost):
            await holds.hold(store, ["a"], 1.0, 1)
        await holds.aclose()
        assert not len(holds)


async def test_it_holds_so_many_at_once_and_for_so_long() -> None:
    async with StoreBuffer() as store:
        holds = StorePins(3600, 2)
        for number in range(5):
            await holds.hold(store, ["a"], 1.0, number)
            await asyncio.sleep(0)
        assert len(holds) <= 2
        holds.abort()
        await holds.aclose()
        short = StorePins(0, 2)
        await short.hold(store, ["a"], 1.0, 0)
        await until(lambda: not len(short))


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
