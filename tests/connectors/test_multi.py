from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import msgspec
import pytest
import torch

from asynckv.abc import (
    KVAnswer,
    KVConnectorHandshake,
    KVConnectorMetadata,
    KVConnectorStep,
    KVQuestion,
    KVRequest,
    KVTransferResults,
)
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.caches import BlockMoves, PagedCaches
from asynckv.connectors.engine import KVEngine, namespace_of, rank_block_keys
from asynckv.connectors.multi import MultiMetadata, MultiScheduler, MultiWorker
from asynckv.connectors.registry import make_scheduler, make_worker
from asynckv.connectors.requests import (
    LoadRequest,
    P2PMetadata,
    StoreMetadata,
    StoreRequest,
)
from asynckv.connectors.store.packing import PackedBlocks
from asynckv.connectors.store.worker import StoreWorker
from asynckv.devices.cuda import Event
from asynckv.tensors.blocks import KVBlocks
from asynckv.testing.blocked import until_blocked
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import make_engine, pair_configs, toy_shape

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
                    "chunk_tokens": 4,
                },
            },
        ]
    },
)


def make() -> MultiScheduler:
    scheduler = make_scheduler(BOTH, ENGINE)
    assert isinstance(scheduler, MultiScheduler)
    return scheduler


@pytest.fixture
def scheduler() -> MultiScheduler:
    return make()


@pytest.fixture
async def store() -> AsyncIterator[StoreBuffer]:
    """The store that schedulers look into."""
    async with StoreBuffer("1MiB", fingerprint="toy") as store:
        async with serve("mem://no-such-store", store=store):
            yield store


@pytest.fixture
async def finding(store: StoreBuffer) -> AsyncIterator[MultiScheduler]:
    """A scheduler that has a store to ask."""
    scheduler = make()
    yield scheduler
    await scheduler.aclose()


async def find(scheduler: MultiScheduler, store: StoreBuffer) -> KVQuestion:
    """Let the store have what is asked for, and say so."""
    (question,) = scheduler.take_questions()
    for key in rank_block_keys(question.keys, namespace_of(ENGINE), 0):
        await store.put(key, torch.ones(1))
    scheduler.take_answer(await scheduler.ask(question))
    return question


def remote(name: str = "r") -> KVRequest:
    asked = {"do_remote_prefill": True, "transfer_id": "t"}
    return KVRequest(name, tuple(range(10)), asked)


def orders(scheduler: MultiScheduler) -> tuple[bytes, ...]:
    metadata = scheduler.build_connector_meta(KVConnectorStep())
    assert isinstance(metadata, MultiMetadata)
    return metadata.parts


def test_it_loads_from_the_first_that_has_something(scheduler: MultiScheduler) -> None:
    empty = orders(scheduler)
    assert scheduler.get_num_new_matched_tokens(remote(), 0) == (10, True)
    scheduler.update_state_after_alloc(remote(), ((1, 2, 3),), 10)
    first, second = orders(scheduler)
    assert first != empty[0]
    assert second == empty[1]


async def test_one_that_does_not_know_yet_is_waited_for(
    finding: MultiScheduler, store: StoreBuffer
) -> None:
    plain = KVRequest("s", tuple(range(10)))
    assert finding.get_num_new_matched_tokens(plain, 0) == (None, False)
    assert (await find(finding, store)).asker == 1
    assert finding.get_num_new_matched_tokens(plain, 0) == (8, True)


def said_by(index: int, *names: str, failed: bool = False) -> KVTransferResults:
    ids = frozenset(names)
    one = KVTransferResults(
        finished_recving=ids, failed_recving=ids if failed else frozenset()
    )
    parts = [KVTransferResults(), KVTransferResults()]
    parts[index] = one
    return msgspec.structs.replace(one, parts=tuple(parts))


async def begin_store_load(scheduler: MultiScheduler, store: StoreBuffer) -> KVRequest:
    plain = KVRequest("s", tuple(range(10)))
    scheduler.on_new_request(plain)
    await find(scheduler, store)
    assert scheduler.get_num_new_matched_tokens(plain, 0) == (8, True)
    scheduler.update_state_after_alloc(plain, ((1, 2, 3),), 8)
    return plain


def loading(scheduler: MultiScheduler) -> MultiScheduler:
    """Have it load a prompt from a peer."""
    scheduler.get_num_new_matched_tokens(remote(), 0)
    scheduler.update_state_after_alloc(remote(), ((1, 2, 3),), 10)
    return scheduler


def test_an_end_comes_out_once(scheduler: MultiScheduler) -> None:
    loading(scheduler)
    assert scheduler.request_finished(remote(), ((1, 2, 3),)) == (True, None)
    said = said_by(0, "r", "other")
    assert scheduler.update_connector_output(said).finished_recving == {"r"}
    assert not scheduler.update_connector_output(said)


@pytest.mark.parametrize("failed", [False, True])
async def test_the_end_of_one_connector_is_none_of_another(
    finding: MultiScheduler, store: StoreBuffer, failed: bool
) -> None:
    await begin_store_load(finding, store)
    assert not finding.update_connector_output(said_by(0, "s", failed=failed))
    believed = finding.update_connector_output(said_by(1, "s"))
    assert believed.finished_recving == {"s"}
    assert not believed.failed_recving


async def test_a_load_of_a_used_id_waits_until_the_older_one_is_quiet(
    finding: MultiScheduler, store: StoreBuffer
) -> None:
    scheduler, plain = loading(finding), KVRequest("r", tuple(range(10)))
    scheduler.request_finished(remote(), ((1, 2, 3),))
    scheduler.on_new_request(plain)
    await find(scheduler, store)
    assert scheduler.get_num_new_matched_tokens(plain, 0) == (None, False)
    scheduler.update_connector_output(said_by(0, "r"))
    assert scheduler.get_num_new_matched_tokens(plain, 0) == (8, True)


async def test_results_that_do_not_say_whose_they_are_are_refused(
    finding: MultiScheduler, store: StoreBuffer
) -> None:
    scheduler = finding
    await begin_store_load(scheduler, store)
    ended = KVTransferResults(finished_recving=frozenset({"s"}))
    with pytest.raises(ValueError, match="parts"):
        scheduler.update_connector_output(ended)
    assert not scheduler.update_connector_output(KVTransferResults())


async def test_questions_go_to_who_asked_them(scheduler: MultiScheduler) -> None:
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


async def test_what_two_loads_of_one_id_hold_is_let_go_by_both(
    finding: MultiScheduler, store: StoreBuffer
) -> None:
    scheduler = finding
    plain = await begin_store_load(scheduler, store)
    assert scheduler.request_finished(plain, ((1, 2, 3),)) == (True, None)
    scheduler.on_new_request(plain)
    assert scheduler.get_num_new_matched_tokens(plain, 0) == (None, False)
    assert scheduler.update_connector_output(said_by(1, "s")).finished_recving == {"s"}
    assert not scheduler.update_connector_output(said_by(1, "s"))


def test_a_connector_that_had_something_before_is_not_asked_to_load_it_now(
    scheduler: MultiScheduler,
) -> None:
    assert scheduler.get_num_new_matched_tokens(remote(), 0) == (10, True)
    asked = remote()
    assert scheduler.get_num_new_matched_tokens(asked, 10) == (None, False)
    scheduler.take_questions()
    scheduler.take_answer(KVAnswer("r", 0, asker=1))
    assert scheduler.get_num_new_matched_tokens(asked, 10) == (0, False)
    scheduler.update_state_after_alloc(asked, ((1, 2, 3),), 4)
    assert not scheduler.update_connector_output(said_by(0, "r")).finished_recving


async def test_an_id_whose_blocks_one_connector_holds_is_loaded_by_no_other(
    finding: MultiScheduler, store: StoreBuffer
) -> None:
    scheduler = finding
    plain = await begin_store_load(scheduler, store)
    scheduler.request_finished(plain, ((1, 2, 3),))
    assert scheduler.get_num_new_matched_tokens(remote("s"), 0) == (None, False)
    scheduler.update_connector_output(said_by(1, "s"))
    assert scheduler.get_num_new_matched_tokens(remote("s"), 0) == (10, True)


MODEL = ToyModel()


def both(config: KVTransferConfig) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_buffer_size="16MiB",
        kv_connector_extra_config={
            "connectors": [
                {
                    "kv_connector": "P2PConnector",
                    "kv_role": config.kv_role,
                    "kv_connector_extra_config": config.kv_connector_extra_config,
                },
                {
                    "kv_connector": "StoreConnector",
                    "kv_connector_extra_config": {
                        "store": "mem://multi-store",
                        "fingerprint": "toy",
                        "chunk_tokens": 16,
                    },
                },
            ]
        },
    )


async def test_what_has_ended_says_whose_it_is() -> None:
    config = pair_configs(["mem://mE"], ["mem://no"], {"direction": "pull"})[1]
    worker = make_worker(both(config), KVEngine(engine_id="E", block_size=16))
    worker.register_kv_caches({"layer": torch.zeros(4, 64)})
    load = LoadRequest("r", "t", "P", ((1,),), num_tokens=3)
    told = (P2PMetadata(loads=(load,)), StoreMetadata())
    async with worker:
        parts = tuple(map(msgspec.msgpack.encode, told))
        worker.bind_connector_metadata(MultiMetadata(parts))
        await worker.start_load_kv()
    results = worker.get_finished()
    first, second = results.parts
    assert first.failed_recving == results.failed_recving == {"r"}
    assert first.invalid_block_ids == results.invalid_block_ids == {1}
    assert not second
    assert worker.get_finished().parts == ()


async def test_a_prompt_is_saved_by_all_and_loaded_from_the_first() -> None:
    configs = pair_configs(["mem://mP"], ["mem://mD"], {"direction": "pull"})
    tokens, shape = list(range(70)), toy_shape(MODEL)
    async with (
        StoreBuffer("16MiB") as store,
        serve("mem://multi-store", store=store),
        make_engine("P", both(configs[0]), shape, MODEL) as prefill,
        make_engine("D", both(configs[1]), shape, MODEL) as decode,
    ):
        first = await prefill.generate(
            tokens, request_id="p", kv_transfer_params={"do_remote_decode": True}
        )
        worker = prefill.workers[0]
        assert isinstance(worker, MultiWorker) and worker.wants_layers
        spooling = worker.children[1]
        assert isinstance(spooling, StoreWorker)
        await spooling.flush()
        last = await decode.generate(
            tokens, 3, request_id="d", kv_transfer_params=first.kv_transfer_params
        )
        assert (last.tokens, last.external_tokens) == (MODEL.generate(tokens, 3), 70)
        stored = await decode.generate(tokens, 3, request_id="e")
        assert (stored.tokens, stored.external_tokens) == (last.tokens, 64)
        assert decode.unknown_completions == 0
        await decode.quiet()


class Child(StoreWorker):
    """One of several, which nothing is stored by."""

    def __init__(self) -> None:
        extra: dict[str, object] = {"store": "mem://no", "fingerprint": "toy"}
        config = KVTransferConfig(
            kv_connector="StoreConnector",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        )
        super().__init__(config, KVEngine(engine_id="E", block_size=16))


class Starting(Child):
    """It is open from its start to its end, and one may not start."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error, self.is_open = error, False

    async def start(self) -> None:
        if self.error is not None:
            raise self.error
        self.is_open = True

    def abort(self) -> None:
        super().abort()
        self.is_open = False


async def test_where_one_does_not_start_those_before_it_are_closed() -> None:
    first = Starting()
    with pytest.raises(OSError, match="no port"):
        await MultiWorker([first, Starting(OSError("no port"))]).start()
    assert not first.is_open


class Meeting(Child):
    """Its saves take until everybody waits who is to come to ``meeting``."""

    def __init__(self, meeting: asyncio.Barrier, error: Exception | None = None):
        super().__init__()
        self.meeting, self.error = meeting, error

    def begin_to_wait(self) -> Coroutine[Any, Any, None]:
        return self._meet()

    async def _meet(self) -> None:
        if self.error is not None:
            raise self.error
        await self.meeting.wait()


async def test_the_saves_of_all_are_waited_for_together() -> None:
    meeting = asyncio.Barrier(2)
    async with MultiWorker([Meeting(meeting), Meeting(meeting)]) as worker:
        async with asyncio.timeout(10):
            await worker.wait_for_save()


class Unbegun(Meeting):
    """Its wait cannot even begin."""

    def begin_to_wait(self) -> Coroutine[Any, Any, None]:
        raise RuntimeError("of one")


@pytest.mark.parametrize("can_begin", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
async def test_where_one_fails_the_saves_of_the_others_are_waited_for(
    can_begin: bool, is_first: bool
) -> None:
    meeting, error = asyncio.Barrier(2), RuntimeError("of one")
    failing = Meeting(meeting, error) if can_begin else Unbegun(meeting)
    children = [failing, Meeting(meeting)]
    async with MultiWorker(children if is_first else children[::-1]) as worker:
        waiting = asyncio.create_task(worker.wait_for_save())
        await until_blocked(waiting)
        assert not waiting.done()
        await meeting.wait()
        with pytest.raises(RuntimeError, match="of one"):
            await waiting


async def test_a_cancelled_wait_leaves_nobody_waiting() -> None:
    meeting = asyncio.Barrier(3)
    async with MultiWorker([Meeting(meeting), Meeting(meeting)]) as worker:
        waiting = asyncio.create_task(worker.wait_for_save())
        await until_blocked(waiting)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not meeting.n_waiting


async def test_a_step_that_is_cleared_once_its_wait_has_begun_is_saved_by_all() -> None:
    engine = KVEngine(engine_id="E", block_size=4)
    order = StoreRequest("r", ("one", "two"), ((1, 2),))
    metadata = MultiMetadata((encoded(order), encoded(order)))
    config = KVTransferConfig(kv_connector_extra_config={"chunk_tokens": 4})
    async with StoreBuffer("16MiB") as one, StoreBuffer("16MiB") as other:
        children = [StoreWorker(config, engine, store) for store in (one, other)]
        worker = MultiWorker(children)
        worker.register_kv_caches({"layer": torch.ones(8, 64)})
        async with worker:
            worker.bind_connector_metadata(metadata)
            saving = asyncio.create_task(worker.wait_for_save())
            await asyncio.sleep(0)
            worker.clear_connector_metadata()
            await saving
            for child in children:
                await child.flush()
                assert child.statistics().saved_blocks == 2


class Noting(BlockMoves):
    """Notes as at which marks blocks are read."""

    is_on_gpu = True  # in host memory nobody asks for marks

    async def gather(
        self,
        sources: Sequence[KVBlocks],
        targets: Sequence[torch.Tensor],
        mark: Event | None,
    ) -> None:
        self.marks = [*getattr(self, "marks", []), mark]
        await super().gather(sources, targets, mark)


async def test_all_save_what_there_was_when_their_wait_began() -> None:
    order = StoreRequest("r", ("one", "two"), ((1, 2),))
    engine = KVEngine(engine_id="E", block_size=4)
    config = KVTransferConfig(kv_connector_extra_config={"chunk_tokens": 4})
    caches = PagedCaches({"layer": torch.ones(8, 64)}, None)
    async with StoreBuffer("16MiB") as store:
        children = [StoreWorker(config, engine, store) for _ in range(2)]
        noting = [Noting(caches, child._pool) for child in children]
        async with MultiWorker(children) as worker:
            for child, moves in zip(children, noting, strict=True):
                child._moves, child._packed = moves, PackedBlocks(moves)
            worker.bind_connector_metadata(MultiMetadata((encoded(order),) * 2))
            worker.follow("then")
            saving = asyncio.create_task(worker.wait_for_save())
            await asyncio.sleep(0)
            worker.follow("later")
            await saving
        assert [moves.marks for moves in noting] == [["then", "then"]] * 2


def encoded(order: StoreRequest) -> bytes:
    return msgspec.msgpack.encode(StoreMetadata(saves=(order,)))


class Said(Child):
    """Says once what it was given to say."""

    def __init__(self, results: KVTransferResults, preempted: list[object]) -> None:
        super().__init__()
        self.results, self.preempted = results, preempted

    def get_finished(
        self, finished_req_ids: frozenset[str] = frozenset()
    ) -> KVTransferResults:
        said, self.results = self.results, KVTransferResults()
        return said

    def handle_preemptions(self, metadata: KVConnectorMetadata) -> None:
        self.preempted.append(metadata)


async def test_a_save_has_failed_if_all_say_so_and_a_load_if_one_does() -> None:
    ids = frozenset({"both", "one"})
    said = [
        KVTransferResults(
            finished_sending=ids,
            failed_sending=frozenset(failed),
            full_sending=frozenset(failed),
            finished_recving=frozenset(loaded),
            failed_recving=frozenset(loaded),
        )
        for failed, loaded in (
            (ids, frozenset({"l"})),
            (frozenset({"both"}), frozenset[str]()),
        )
    ]
    async with MultiWorker([Said(one, []) for one in said]) as worker:
        results = worker.get_finished()
        assert results.finished_sending == ids
        assert results.failed_sending == results.full_sending == {"both"}
        assert results.failed_recving == {"l"}
        assert results.parts == tuple(said)


async def test_all_are_told_what_was_preempted() -> None:
    orders, told = (
        [encoded(StoreRequest(n, (n,), ((1,),))) for n in "ab"],
        list[object](),
    )
    children = [Said(KVTransferResults(), told) for _ in orders]
    async with MultiWorker(children) as worker:
        worker.handle_preemptions(MultiMetadata(tuple(orders)))
    assert [msgspec.msgpack.encode(one) for one in told] == orders
