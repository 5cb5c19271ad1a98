"""Two toy engines, and every byte that goes from one to the other."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest
import torch

from asynckv.abc import KVConnectorMetadata
from asynckv.buffers.lookup import LookupBuffer
from asynckv.config import KVRole
from asynckv.connectors.engine import EntryHeader, KVEngine
from asynckv.connectors.options import Direction
from asynckv.connectors.p2p.save import P2PSave
from asynckv.connectors.p2p.scheduler import P2PScheduler
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.requests import LoadRequest, P2PMetadata, SaveRequest
from asynckv.parallel.shapes import EngineShape, KVLayout
from asynckv.testing.blocked import until
from harness.engines.toy_engine import ToyEngine, ToyLoadFailed
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import make_engine, pair_configs, toy_shape
from harness.engines.toy_rank import ToyRank

MODEL = ToyModel()
NAMES = itertools.count()
PREFILL = {"do_remote_decode": True}
LOAD: dict[str, object] = {"do_remote_prefill": True, "transfer_id": "t"}
DIRECTIONS = pytest.mark.parametrize("direction", ["pull", "push"])

Pair = tuple[ToyEngine, ToyEngine]


def prompt(length: int = 70, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(50_000) for _ in range(length)]


def worker_of(engine: ToyEngine, rank: int = 0) -> P2PWorker:
    worker = engine.workers[rank]
    assert isinstance(worker, P2PWorker)
    return worker


def scheduler_of(engine: ToyEngine) -> P2PScheduler:
    assert isinstance(engine.scheduler, P2PScheduler)
    return engine.scheduler


def buffer_of(worker: P2PWorker) -> LookupBuffer:
    assert worker.routes.buffer is not None
    return worker.routes.buffer


@asynccontextmanager
async def pair_of(
    p: EngineShape | None = None,
    d: EngineShape | None = None,
    *,
    roles: tuple[KVRole, KVRole] = ("kv_producer", "kv_consumer"),
    **extra: object,
) -> AsyncIterator[Pair]:
    p, d, name = p or toy_shape(MODEL), d or toy_shape(MODEL), next(NAMES)
    urls = [
        [f"mem://{side}{name}" + (f".{rank}" if rank else "") for rank in range(size)]
        for side, size in (("P", p.tp_size), ("D", d.tp_size))
    ]
    options = {"direction": "pull", **extra}
    configs = pair_configs(urls[0], urls[1], options, roles=roles)
    async with (
        make_engine("P", configs[0], p, MODEL, chunk=32) as prefill,
        make_engine("D", configs[1], d, MODEL) as decode,
    ):
        yield prefill, decode


async def prefilled(
    pair: Pair, tokens: list[int], name: str = "p", **params: object
) -> dict[str, object]:
    """Return what a request says that goes on from this one."""
    asked = {**PREFILL, **params}
    output = await pair[0].generate(tokens, request_id=name, kv_transfer_params=asked)
    assert output.kv_transfer_params is not None
    return output.kv_transfer_params


async def decoded(
    pair: Pair,
    tokens: list[int],
    params: dict[str, object],
    name: str = "d",
    cached: int = 0,
) -> int:
    """Return how much of the prompt was loaded; what follows it is right."""
    last = await pair[1].generate(
        *(tokens, 3),
        request_id=name,
        kv_transfer_params=params,
        cached_tokens=cached,
    )
    assert last.tokens == MODEL.generate(tokens, 3)
    return last.external_tokens


async def hand_over(
    pair: Pair, tokens: list[int], name: str = "r", cached: int = 0
) -> int:
    params = await prefilled(pair, tokens, f"{name}-p")
    return await decoded(pair, tokens, params, name, cached)


async def fill(worker: P2PWorker, leave: int = 65536) -> LookupBuffer:
    """Leave no room for a prompt; what says so may fit."""
    buffer = buffer_of(worker)
    full = torch.zeros(buffer.statistics().max_bytes - leave, dtype=torch.uint8)
    await buffer.insert([1], None, full, None, None, entry_id="full")
    return buffer


def has_let_go(worker: P2PWorker) -> bool:
    return not worker.statistics().releasing


async def all_quiet(pair: Pair) -> None:
    for engine in pair:
        await engine.quiet()
        for rank in range(len(engine.workers)):
            worker = worker_of(engine, rank)
            await until(functools.partial(has_let_go, worker))
        assert engine.unknown_completions == 0
    for engine in pair:  # what one has let go of lay in the other's buffer
        for rank in range(len(engine.workers)):
            buffer = worker_of(engine, rank).routes.buffer
            assert buffer is None or buffer.statistics().entries == 0


SHAPES = [
    (toy_shape(MODEL), toy_shape(MODEL)),
    (toy_shape(MODEL, tp_size=2), toy_shape(MODEL)),
    (toy_shape(MODEL), toy_shape(MODEL, tp_size=2)),
    (
        toy_shape(MODEL, tp_size=4, layout=KVLayout.blocks_first("HND")),
        toy_shape(MODEL, tp_size=2, block_size=32, layout=KVLayout.fused()),
    ),
]


@DIRECTIONS
@pytest.mark.parametrize(("p", "d"), SHAPES)
async def test_another_engine_goes_on_from_the_kv_of_the_first(
    direction: str, p: EngineShape, d: EngineShape
) -> None:
    async with pair_of(p, d, direction=direction) as pair:
        assert await hand_over(pair, prompt()) == 70
        assert await hand_over(pair, prompt(), "again", d.block_size) == (
            70 - d.block_size
        )
        await all_quiet(pair)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64])
async def test_prompts_of_any_length_go_over(length: int) -> None:
    async with pair_of() as pair:
        assert await hand_over(pair, prompt(length)) == length
        await all_quiet(pair)


class SpoiltRank(ToyRank):
    """One whose caches are not quite right."""

    def write(
        self, layer: str, block_ids: Sequence[int], token_ids: Sequence[int], start: int
    ) -> None:
        super().write(layer, block_ids, token_ids, start)
        if start + len(token_ids) > 30:
            self.caches[layer].view(-1)[::7] += 1


async def test_a_wrong_byte_would_be_seen() -> None:
    async with pair_of() as pair:
        pair[0].ranks[0].__class__ = SpoiltRank
        params = await prefilled(pair, prompt())
        last = await pair[1].generate(
            prompt(), 3, request_id="d", kv_transfer_params=params
        )
        assert last.external_tokens == 70
        assert last.tokens != MODEL.generate(prompt(), 3)


def begin_to_decode(pair: Pair, name: str = "d", cached: int = 0) -> asyncio.Task[int]:
    return asyncio.create_task(decoded(pair, prompt(), LOAD, name, cached))


async def until_loading(pair: Pair) -> None:
    await until(lambda: worker_of(pair[1]).statistics().loading == 1)


@DIRECTIONS
async def test_decode_may_ask_before_prefill_has_begun(direction: str) -> None:
    async with pair_of(direction=direction) as pair:
        decoding = begin_to_decode(pair)
        await until_loading(pair)
        await prefilled(pair, prompt(), transfer_id="t")
        assert await decoding == 70
        await all_quiet(pair)


async def test_what_is_not_needed_is_let_go_by_its_producer() -> None:
    async with pair_of() as pair:
        assert await hand_over(pair, prompt(64), cached=64) == 0
        await all_quiet(pair)


async def test_kv_of_another_prompt_is_never_taken() -> None:
    async with pair_of() as pair:
        params, other = await prefilled(pair, prompt()), prompt(seed=2)
        await decoded(pair, other, params)
        assert "another prompt" in pair[1].failures["d"]
        # Nor is it let go of, also if nothing of it is needed: others wait for it.
        await decoded(pair, other, params, "e", cached=len(other))
        await until(functools.partial(has_let_go, worker_of(pair[1])))
        assert await decoded(pair, prompt(), params, "f") == 70
        await all_quiet(pair)


@DIRECTIONS
async def test_of_four_requests_for_one_transfer_one_loads_it(
    direction: Direction,
) -> None:
    """The others find it in the engine's prefix cache, as if there were one."""
    async with pair_of(direction=direction) as pair:
        decoding = [
            begin_to_decode(pair, f"d{number}", cached=64 if number else 0)
            for number in range(4)
        ]
        await until_loading(pair)
        await prefilled(pair, prompt(), transfer_id="t")
        assert await asyncio.gather(*decoding) == [70, 0, 0, 0]
        assert not pair[1].failures
        await all_quiet(pair)


async def test_without_a_prefix_cache_the_others_compute_it_at_once() -> None:
    async with pair_of() as pair:
        params = await prefilled(pair, prompt())
        decode = functools.partial(decoded, pair, prompt(), params)
        await asyncio.gather(decode("d"), decode("e"))
        assert "d has loaded its transfer" in pair[1].failures["e"]
        await decode("late")  # who comes later is told by its producer
        assert "others have taken that entry" in pair[1].failures["late"]
        await all_quiet(pair)


async def test_a_load_is_taken_over_from_a_request_that_is_aborted() -> None:
    async with pair_of() as pair:
        first, second = (begin_to_decode(pair, name) for name in ("first", "second"))
        await until_loading(pair)
        first.cancel()
        await asyncio.wait([first])
        await prefilled(pair, prompt(), transfer_id="t")
        assert await second == 70
        await all_quiet(pair)


async def test_a_peer_that_is_not_configured_is_never_dialled() -> None:
    async with pair_of() as pair:
        await decoded(pair, prompt(), {**LOAD, "peer": "tcp://10.0.0.1:1"})
        assert scheduler_of(pair[1]).statistics().refused_params == 1
        assert worker_of(pair[1]).statistics().connected_peers == 0


FOUR_RANKS = msgspec.to_builtins(toy_shape(MODEL, tp_size=4))


@pytest.mark.parametrize(
    ("params", "words", "dialled"),
    [
        ({"shape": FOUR_RANKS}, "has 4 x 1 ranks, the configuration 1", 0),
        ({"incarnations": ["of before"]}, "PeerRestarted", 1),
        ({"transfer_id": "never"}, "TimeoutError", 1),
    ],
    ids=["ranks that it makes up", "of a peer that has restarted", "never comes"],
)
async def test_what_cannot_be_loaded_is_computed_and_it_is_said_why(
    params: dict[str, object], words: str, dialled: int
) -> None:
    load_timeout_s = 0.05 if words == "TimeoutError" else 30.0
    async with pair_of(load_timeout_s=load_timeout_s) as pair:
        await decoded(pair, prompt(), {**LOAD, **params})
        assert words in pair[1].failures["d"]
        assert len(worker_of(pair[1]).routes.peers._lines) == dialled


async def test_loads_of_a_peer_that_dies_fail_at_once() -> None:
    async with pair_of() as pair:
        decoding, buffer = begin_to_decode(pair), buffer_of(worker_of(pair[0]))
        await until(lambda: buffer.statistics().waiting_selects == 1)
        worker_of(pair[0]).routes.abort()
        await decoding
        assert pair[1].failures["d"].startswith(("PeerLost", "BufferClosed"))
        await pair[1].quiet()


async def test_a_link_that_nothing_is_loaded_by_fails_no_load_when_it_is_lost() -> None:
    roles: tuple[KVRole, KVRole] = ("kv_both", "kv_both")
    async with pair_of(roles=roles) as pair:
        theirs, ours = (worker_of(engine) for engine in pair)
        await theirs.routes.peers.find("D", 0)  # as if it had fetched something
        decoding = begin_to_decode(pair)
        await until(lambda: ours.statistics().connected_peers == 1)
        theirs.routes.peers.hang_up("D", 0)
        await until(lambda: ours.statistics().links == 1)
        await prefilled(pair, prompt(), transfer_id="t")
        assert await decoding == 70
        assert not pair[1].failures


async def test_by_policy_a_failed_load_fails_its_request() -> None:
    async with pair_of(load_timeout_s=0.05) as pair:
        pair[1]._policy = "fail"
        with pytest.raises(ToyLoadFailed):
            await decoded(pair, prompt(), LOAD)
        await pair[1].quiet()


async def test_an_aborted_load_gives_its_blocks_back_when_it_is_quiet() -> None:
    async with pair_of() as pair:
        decoding = begin_to_decode(pair)
        await until_loading(pair)
        decoding.cancel()
        await asyncio.wait([decoding])
        assert pair[1].blocks_in_use > 0
        await pair[1].quiet()
        # Its producer, which comes later, is told that nobody needs it.
        await prefilled(pair, prompt(), transfer_id="t")
        await all_quiet(pair)


@DIRECTIONS
async def test_what_an_aborted_prefill_saved_leaves_at_once(direction: str) -> None:
    async with pair_of(direction=direction) as pair:
        buffer = buffer_of(worker_of(pair[direction == "push"]))
        prefilling = asyncio.create_task(
            pair[0].generate(prompt(), 150, request_id="p", kv_transfer_params=PREFILL)
        )
        await until(lambda: buffer.statistics().inserted == 1)
        prefilling.cancel()
        await asyncio.wait([prefilling])
        await until(lambda: buffer.statistics().withdrawn == 1)
        await all_quiet(pair)


async def test_a_full_engine_neither_waits_for_room_again_nor_promises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asynckv.connectors.p2p.routes._FULL_AFTER_S", 0.0)
    async with pair_of(save_timeout_s=60) as pair:
        buffer = await fill(worker_of(pair[0]))
        for number in range(3):
            named = {"transfer_id": "t"} if number == 1 else {}
            output = await pair[0].generate(
                prompt(),
                request_id=f"p{number}",
                kv_transfer_params={**PREFILL, **named},
            )
            assert (output.kv_transfer_params is None) is bool(number)
        # The one that waits, and what says to who may ask why it has no other.
        assert buffer.statistics().waiting_inserts == 2
        await decoded(pair, prompt(), LOAD)
        assert "there is no room here" in pair[1].failures["d"]


@pytest.mark.parametrize("is_full", [True, False])
async def test_one_rank_that_is_full_keeps_its_engine_from_promising_for_now(
    is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose save failed for another reason does not."""

    async def fail() -> LookupBuffer:
        raise OSError("for another reason")

    monkeypatch.setattr("asynckv.connectors.p2p.scheduler._FULL_S", 600.0)
    save_timeout_s = 0.01 if is_full else 30.0
    shape = toy_shape(MODEL, tp_size=2)
    async with pair_of(shape, save_timeout_s=save_timeout_s) as pair:
        ranks = [worker_of(pair[0], rank) for rank in range(2)]
        with monkeypatch.context() as patch:
            if is_full:
                await fill(ranks[1], leave=8)  # its token takes some
            else:
                patch.setattr(
                    ranks[1].routes, "targets", lambda order: [(fail, "t", 1)]
                )
            run = functools.partial(pair[0].generate, kv_transfer_params=PREFILL)
            await run(prompt(), request_id="p")
            await until(lambda: not any(one.statistics().saving for one in ranks))
        await buffer_of(ranks[1]).withdraw("full")
        output = await run(prompt(seed=2), request_id="q")
        assert (output.kv_transfer_params is None) is is_full


async def test_requests_that_save_one_transfer_leave_one_entry() -> None:
    async with pair_of() as pair:
        for name in ("p", "q"):
            assert await prefilled(pair, prompt(), name, transfer_id="t")
        assert buffer_of(worker_of(pair[0])).statistics().entries == 1


@DIRECTIONS
async def test_samples_of_a_prompt_leave_one_entry_that_any_of_them_names(
    direction: str,
) -> None:
    async with pair_of(direction=direction) as pair:
        first, *_, last = [
            await pair[0].generate(
                *(prompt(), 1),
                request_id=f"{number}_p",
                parent_id="p",
                kv_transfer_params=PREFILL,
            )
            for number in range(3)
        ]
        params = last.kv_transfer_params
        assert params is not None and first.kv_transfer_params == params
        buffer = buffer_of(worker_of(pair[direction == "push"]))
        assert buffer.statistics().entries == 1
        assert await decoded(pair, prompt(), params) == 70
        await all_quiet(pair)


@DIRECTIONS
async def test_prefill_without_room_goes_on_and_who_decodes_learns_at_once(
    direction: str,
) -> None:
    async with pair_of(save_timeout_s=0.01, direction=direction) as pair:
        buffer = await fill(worker_of(pair[direction == "push"]))
        params = {**PREFILL, "transfer_id": "t"}
        first = await pair[0].generate(
            prompt(), request_id="p", kv_transfer_params=params
        )
        assert first.kv_transfer_params is None
        await decoded(pair, prompt(), LOAD)
        assert "has not saved it: it took longer than 0.01 s" in pair[1].failures["d"]
        assert buffer.statistics().entries == 1
        await pair[0].quiet()


async def fail_to_save(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill for a transfer that has a name, with no way to where it goes."""

    async def fail() -> LookupBuffer:
        raise OSError("a device failed")

    worker = worker_of(pair[0])
    asked = {**PREFILL, "transfer_id": "t"}
    with monkeypatch.context() as patch:
        patch.setattr(P2PSave, "run", lambda *args, **kwargs: fail())
        await pair[0].generate(prompt(), request_id="p", kv_transfer_params=asked)
        await until(lambda: not worker.statistics().saving)
    await until(functools.partial(has_let_go, worker))


@DIRECTIONS
async def test_a_transfer_that_was_not_saved_may_be_prefilled_again(
    direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair_of(direction=direction) as pair:
        await fail_to_save(pair, monkeypatch)
        params = await prefilled(pair, prompt(), "again", transfer_id="t")
        assert await decoded(pair, prompt(), params) == 70
        await all_quiet(pair)


@DIRECTIONS
async def test_once_it_was_heard_that_a_transfer_failed_it_is_not_saved(
    direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its id nobody could be told apart who has heard it from who has not."""
    async with pair_of(direction=direction) as pair:
        await fail_to_save(pair, monkeypatch)
        await decoded(pair, prompt(), LOAD)
        assert "a device failed" in pair[1].failures["d"]
        worker, asked = worker_of(pair[0]), {**PREFILL, "transfer_id": "t"}
        for failed, name in enumerate(("q", "r"), 2):
            await pair[0].generate(prompt(), request_id=name, kv_transfer_params=asked)
            await until(lambda: not worker.statistics().saving)
            assert worker.statistics().transfers.failed == failed
        await all_quiet(pair)


KV = dict.fromkeys(MODEL.layer_names, (2, 8, 16, 4, 8))
SAVE = SaveRequest("r", "t", "", (1, 2, 3), ((4,),), b"salt")


@pytest.fixture
async def alone() -> AsyncIterator[P2PWorker]:
    """A worker that has begun, with caches full of ones; there is no peer of it."""
    url = f"mem://alone{next(NAMES)}"
    config = pair_configs([url], ["mem://nobody"], {"direction": "pull"})[0]
    engine = KVEngine(engine_id="P", block_size=16, shape=toy_shape(MODEL))
    async with P2PWorker(config, engine) as worker:
        worker.register_kv_caches({layer: torch.ones(KV[layer]) for layer in KV})
        await worker.start()
        yield worker


async def test_after_wait_for_save_the_blocks_may_be_overwritten(
    alone: P2PWorker,
) -> None:
    alone.bind_connector_metadata(P2PMetadata(saves=(SAVE,)))
    await alone.start_load_kv()
    for layer in (*KV, "no such layer"):
        alone.save_kv_layer(layer)
    await alone.wait_for_save()
    for layer in KV:
        for pool in alone._registered().caches.pools(layer):
            pool.zero_()
    async with buffer_of(alone).drop_select(entry_id="t") as entry:
        assert isinstance(entry.value, dict)
        assert all(bool((tensor == 1).all()) for tensor in entry.value.values())
        assert EntryHeader.of(entry.extras["asynckv"]).salt == b"salt"
    await until(lambda: not alone.statistics().saving)
    assert alone.get_finished().finished_sending == {"r"}


async def test_what_is_refused_is_not_saved_and_who_waits_learns_why(
    alone: P2PWorker,
) -> None:
    order = msgspec.structs.replace(SAVE, refusal="too large")
    alone.bind_connector_metadata(P2PMetadata(saves=(order,)))
    await alone.start_load_kv()
    await alone.wait_for_save()
    async with buffer_of(alone).drop_select(entry_id="t") as entry:
        assert EntryHeader.of(entry.extras["asynckv"]).failure == "too large"
        assert not entry.key
    assert not alone.get_finished()


async def test_start_load_kv_returns_whatever_the_peer_does(alone: P2PWorker) -> None:
    order = LoadRequest("r", "t", "D", ((1,),), num_tokens=3, is_async=False)
    alone.bind_connector_metadata(P2PMetadata(loads=(order,)))
    for _ in range(2):
        await alone.start_load_kv()
    assert alone.statistics().loading == 1
    await alone.wait_for_layer_load(MODEL.layer_names[0])
    results = alone.get_finished()
    assert results.failed_recving == {"r"}
    assert results.invalid_block_ids == {1}


async def test_a_load_that_cannot_begin_fails_and_those_after_it_begin(
    alone: P2PWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = alone._loading._begin

    def begin_some(request: LoadRequest) -> None:
        if request.request_id == "a":
            raise ArithmeticError("nobody thought of this")
        begin(request)

    monkeypatch.setattr(alone._loading, "_begin", begin_some)
    orders = tuple(LoadRequest(name, name, "D", ((1,),)) for name in "ab")
    alone.bind_connector_metadata(P2PMetadata(loads=orders))
    await alone.start_load_kv()
    results = alone.get_finished()
    assert results.failed_recving == results.finished_recving == {"a"}
    assert results.invalid_block_ids == {1}
    assert results.reasons["a"] == "ArithmeticError: nobody thought of this"
    assert alone.statistics().loading == 1


async def test_what_a_worker_that_is_closed_is_to_move_fails_at_once(
    alone: P2PWorker,
) -> None:
    await alone.aclose()
    load = LoadRequest("d", "t", "D", ((1,),), num_tokens=3)
    alone.bind_connector_metadata(P2PMetadata(loads=(load,), saves=(SAVE,)))
    await alone.start_load_kv()
    await alone.wait_for_save()
    results = alone.get_finished()
    assert results.failed_recving == {"d"} and results.failed_sending == {"r"}
    assert set(results.reasons.values()) == {"the connector is closed"}
    assert not alone.statistics().releasing


async def test_orders_of_another_connector_are_refused(alone: P2PWorker) -> None:
    with pytest.raises(TypeError, match="another connector"):
        alone.bind_connector_metadata(KVConnectorMetadata())


async def test_nothing_is_saved_before_there_are_caches() -> None:
    config = pair_configs(["mem://alone"], ["mem://no"], {"direction": "pull"})[0]
    async with P2PWorker(config, KVEngine(engine_id="P", block_size=16)) as worker:
        with pytest.raises(RuntimeError, match="register_kv_caches"):
            worker.bind_connector_metadata(P2PMetadata(saves=(SAVE,)))


async def test_a_cancelled_wait_for_save_leaves_the_save_as_it_is(
    alone: P2PWorker,
) -> None:
    alone.bind_connector_metadata(P2PMetadata(saves=(SAVE,)))
    waiting = asyncio.create_task(alone.wait_for_save())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    await alone.wait_for_save()
    await until(lambda: not alone.statistics().saving)
    assert alone.get_finished().failed_sending == frozenset()
    assert await buffer_of(alone).peek([1, 2, 3]) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "direction", ["pull", pytest.param("push", marks=pytest.mark.chaos)]
)
async def test_a_hundred_aborts_under_load_leave_nothing_behind(direction: str) -> None:
    chance = random.Random(7)
    async with pair_of(SHAPES[1][0], SHAPES[1][1], direction=direction) as pair:

        async def one(number: int) -> None:
            tokens = prompt(chance.randrange(1, 120), number)
            name = f"r{number}"
            cached = 16 if len(tokens) > 16 and not chance.randrange(3) else 0
            working = asyncio.create_task(hand_over(pair, tokens, name, cached))
            if number % 2:
                await asyncio.wait([working], timeout=chance.random() * 0.03)
                working.cancel()
                await asyncio.wait([working])
            else:
                await working

        for start in range(0, 200, 8):
            async with asyncio.TaskGroup() as group:
                for number in range(start, start + 8):
                    group.create_task(one(number))
        for engine in pair:
            async with asyncio.timeout(10):
                await engine.quiet()
            assert engine.unknown_completions == 0
