"""Two toy engines, and every byte that goes from one to the other."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import torch

from asynckv.abc import KVConnectorMetadata
from asynckv.buffers.lookup import LookupBuffer
from asynckv.config import KVRole, KVTransferConfig
from asynckv.connectors.caches import BlockMoves
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.keys import EntryHeader
from asynckv.connectors.options import Direction
from asynckv.connectors.p2p.scheduler import P2PScheduler
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.requests import LoadOrder, P2PMetadata, SaveOrder
from asynckv.devices.names import Device
from asynckv.errors import WrongLoop
from asynckv.parallel.shapes import EngineShape, KVLayout
from asynckv.testing.blocked import until, until_blocked
from harness.engines.toy_engine import ToyEngine, ToyLoadFailed
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import make_engine, pair_configs, toy_shape
from harness.engines.toy_rank import ToyRank
from harness.fake_devices import fake_device, lanes_of
from harness.gpu_workers import worker_on

MODEL = ToyModel()
NAMES = itertools.count()
PREFILL = {"do_remote_decode": True}

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
    p: EngineShape | None = None, d: EngineShape | None = None, **extra: object
) -> AsyncIterator[Pair]:
    p, d, name = p or toy_shape(MODEL), d or toy_shape(MODEL), next(NAMES)
    urls = [
        [f"mem://{side}{name}" + (f".{rank}" if rank else "") for rank in range(size)]
        for side, size in (("P", p.tp_size), ("D", d.tp_size))
    ]
    configs = pair_configs(urls[0], urls[1], {"direction": "pull", **extra})
    async with (
        make_engine("P", configs[0], p, MODEL, chunk=32) as prefill,
        make_engine("D", configs[1], d, MODEL) as decode,
    ):
        yield prefill, decode


async def hand_over(
    pair: Pair, tokens: list[int], name: str = "r", cached: int = 0, count: int = 3
) -> tuple[list[int], int]:
    prefill, decode = pair
    first = await prefill.generate(
        tokens, request_id=f"{name}-p", kv_transfer_params=PREFILL
    )
    assert first.kv_transfer_params is not None
    last = await decode.generate(
        tokens,
        count,
        request_id=name,
        kv_transfer_params=first.kv_transfer_params,
        cached_tokens=cached,
    )
    return last.tokens, last.external_tokens


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


@pytest.mark.parametrize("direction", ["pull", "push"])
@pytest.mark.parametrize(("p", "d"), SHAPES)
async def test_another_engine_goes_on_from_the_kv_of_the_first(
    direction: str, p: EngineShape, d: EngineShape
) -> None:
    async with pair_of(p, d, direction=direction) as pair:
        tokens = prompt()
        assert await hand_over(pair, tokens) == (MODEL.generate(tokens, 3), 70)
        assert await hand_over(pair, tokens, "again", d.block_size) == (
            MODEL.generate(tokens, 3),
            70 - d.block_size,
        )
        await all_quiet(pair)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64])
async def test_prompts_of_any_length_go_over(length: int) -> None:
    async with pair_of() as pair:
        tokens = prompt(length)
        assert await hand_over(pair, tokens) == (MODEL.generate(tokens, 3), length)
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
        tokens = prompt()
        pair[0].ranks[0].__class__ = SpoiltRank
        assert (await hand_over(pair, tokens))[0] != MODEL.generate(tokens, 3)


async def test_decode_may_ask_before_prefill_has_begun() -> None:
    for direction in ("pull", "push"):
        async with pair_of(direction=direction) as pair:
            tokens = prompt()
            params = {"do_remote_prefill": True, "transfer_id": "t"}
            decoding = asyncio.create_task(
                pair[1].generate(tokens, 2, request_id="d", kv_transfer_params=params)
            )
            await until(lambda: worker_of(pair[1]).statistics().loading == 1)
            await pair[0].generate(
                tokens,
                request_id="p",
                kv_transfer_params={**PREFILL, "transfer_id": "t"},
            )
            assert (await decoding).tokens == MODEL.generate(tokens, 2)
            await all_quiet(pair)


async def test_what_is_not_needed_is_let_go_by_its_producer() -> None:
    async with pair_of() as pair:
        tokens = prompt(64)
        assert (await hand_over(pair, tokens, cached=64))[1] == 0
        await all_quiet(pair)


async def test_kv_of_another_prompt_is_never_taken() -> None:
    async with pair_of() as pair:
        first = await pair[0].generate(
            prompt(), request_id="p", kv_transfer_params=PREFILL
        )
        other = prompt(seed=2)
        last = await pair[1].generate(
            other, 2, request_id="d", kv_transfer_params=first.kv_transfer_params
        )
        assert last.tokens == MODEL.generate(other, 2)
        assert "another prompt" in pair[1].failures["d"]
        # Nor is it let go of, also if nothing of it is needed: others wait for it.
        await pair[1].generate(
            other,
            request_id="e",
            kv_transfer_params=first.kv_transfer_params,
            cached_tokens=len(other),
        )
        await until(functools.partial(has_let_go, worker_of(pair[1])))
        mine = await pair[1].generate(
            prompt(), request_id="f", kv_transfer_params=first.kv_transfer_params
        )
        assert mine.external_tokens == 70
        await all_quiet(pair)


@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_of_four_requests_for_one_transfer_one_loads_it(
    direction: Direction,
) -> None:
    """The others find it in the engine's prefix cache, as if there were one."""
    async with pair_of(direction=direction) as pair:
        tokens = prompt()
        asked = {"do_remote_prefill": True, "transfer_id": "t"}
        decoding = [
            asyncio.create_task(
                pair[1].generate(
                    *(tokens, 2),
                    request_id=f"d{number}",
                    kv_transfer_params=asked,
                    cached_tokens=64 if number else 0,
                )
            )
            for number in range(4)
        ]
        await until(lambda: worker_of(pair[1]).statistics().loading == 1)
        named = {**PREFILL, "transfer_id": "t"}
        await pair[0].generate(tokens, request_id="p", kv_transfer_params=named)
        outputs = await asyncio.gather(*decoding)
        assert [one.external_tokens for one in outputs] == [70, 0, 0, 0]
        assert all(one.tokens == MODEL.generate(tokens, 2) for one in outputs)
        assert not pair[1].failures
        await all_quiet(pair)


async def test_without_a_prefix_cache_the_others_compute_it_at_once() -> None:
    async with pair_of() as pair:
        tokens = prompt()
        first = await pair[0].generate(
            tokens, request_id="p", kv_transfer_params=PREFILL
        )
        decode = functools.partial(
            pair[1].generate, tokens, 2, kv_transfer_params=first.kv_transfer_params
        )
        both = asyncio.gather(decode(request_id="d"), decode(request_id="e"))
        assert all(one.tokens == MODEL.generate(tokens, 2) for one in await both)
        assert "d has loaded its transfer" in pair[1].failures["e"]
        # And who comes later is told by its producer.
        assert (await decode(request_id="late")).tokens == MODEL.generate(tokens, 2)
        assert "others have taken that entry" in pair[1].failures["late"]
        await all_quiet(pair)


async def test_a_load_is_taken_over_from_a_request_that_is_aborted() -> None:
    async with pair_of() as pair:
        tokens, params = prompt(), {"do_remote_prefill": True, "transfer_id": "t"}
        first, second = (
            asyncio.create_task(
                pair[1].generate(tokens, 2, request_id=name, kv_transfer_params=params)
            )
            for name in ("first", "second")
        )
        await until(lambda: worker_of(pair[1]).statistics().loading == 1)
        first.cancel()
        await asyncio.wait([first])
        await pair[0].generate(
            tokens, request_id="p", kv_transfer_params={**PREFILL, "transfer_id": "t"}
        )
        assert (await second).external_tokens == 70
        await all_quiet(pair)


async def test_a_peer_that_is_not_configured_is_never_dialled() -> None:
    async with pair_of() as pair:
        tokens = prompt()
        params = {
            "do_remote_prefill": True,
            "transfer_id": "t",
            "peer": "tcp://10.0.0.1:1",
        }
        last = await pair[1].generate(
            tokens, 2, request_id="d", kv_transfer_params=params
        )
        assert last.tokens == MODEL.generate(tokens, 2)
        assert scheduler_of(pair[1]).statistics().refused_params == 1
        assert worker_of(pair[1]).statistics().connected_peers == 0


async def test_ranks_that_a_request_makes_up_are_never_dialled() -> None:
    async with pair_of() as pair:
        tokens, shape = prompt(), toy_shape(MODEL, tp_size=4)
        params = {
            "do_remote_prefill": True,
            "transfer_id": "t",
            "shape": msgspec.to_builtins(shape),
        }
        last = await pair[1].generate(
            tokens, 2, request_id="d", kv_transfer_params=params
        )
        assert last.tokens == MODEL.generate(tokens, 2)
        assert "has 4 x 1 ranks, the configuration 1" in pair[1].failures["d"]
        assert not worker_of(pair[1]).routes.peers._lines


async def test_loads_of_a_peer_that_dies_fail_at_once() -> None:
    async with pair_of() as pair:
        tokens = prompt()
        params = {"do_remote_prefill": True, "transfer_id": "t"}
        decoding = asyncio.create_task(
            pair[1].generate(tokens, 2, request_id="d", kv_transfer_params=params)
        )
        buffer = buffer_of(worker_of(pair[0]))
        await until(lambda: buffer.statistics().waiting_selects == 1)
        worker_of(pair[0]).routes.abort()
        assert (await decoding).tokens == MODEL.generate(tokens, 2)
        assert pair[1].failures["d"].startswith(("PeerLost", "BufferClosed"))
        await pair[1].quiet()


async def test_kv_of_a_peer_that_has_restarted_is_not_waited_for() -> None:
    async with pair_of() as pair:
        tokens = prompt()
        params = {
            "do_remote_prefill": True,
            "transfer_id": "t",
            "incarnations": ["of before"],
        }
        last = await pair[1].generate(
            tokens, 2, request_id="d", kv_transfer_params=params
        )
        assert last.tokens == MODEL.generate(tokens, 2)
        assert "PeerRestarted" in pair[1].failures["d"]


async def test_what_never_comes_fails_in_time() -> None:
    async with pair_of(load_timeout_s=0.05) as pair:
        tokens = prompt()
        params = {"do_remote_prefill": True, "transfer_id": "never"}
        last = await pair[1].generate(
            tokens, 2, request_id="d", kv_transfer_params=params
        )
        assert last.tokens == MODEL.generate(tokens, 2)
        assert "TimeoutError" in pair[1].failures["d"]


async def test_by_policy_a_failed_load_fails_its_request() -> None:
    async with pair_of(load_timeout_s=0.05) as pair:
        pair[1]._policy = "fail"
        params = {"do_remote_prefill": True, "transfer_id": "never"}
        with pytest.raises(ToyLoadFailed):
            await pair[1].generate(prompt(), request_id="d", kv_transfer_params=params)
        await pair[1].quiet()


async def test_an_aborted_load_gives_its_blocks_back_when_it_is_quiet() -> None:
    async with pair_of() as pair:
        params = {"do_remote_prefill": True, "transfer_id": "t"}
        decoding = asyncio.create_task(
            pair[1].generate(prompt(), request_id="d", kv_transfer_params=params)
        )
        await until(lambda: worker_of(pair[1]).statistics().loading == 1)
        decoding.cancel()
        await asyncio.wait([decoding])
        assert pair[1].blocks_in_use > 0
        await pair[1].quiet()
        # Its producer, which comes later, is told that nobody needs it.
        await pair[0].generate(
            prompt(), request_id="p", kv_transfer_params={**PREFILL, "transfer_id": "t"}
        )
        await all_quiet(pair)


@pytest.mark.parametrize("direction", ["pull", "push"])
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


async def test_prefill_without_room_goes_on_and_says_that_it_did_not_keep_it() -> None:
    async with pair_of(save_timeout_s=0.01) as pair:
        buffer = buffer_of(worker_of(pair[0]))
        full = torch.zeros(buffer.statistics().max_bytes - 65536, dtype=torch.uint8)
        await buffer.insert([1], None, full, None, None)
        first = await pair[0].generate(
            prompt(), request_id="p", kv_transfer_params=PREFILL
        )
        assert first.kv_transfer_params is None
        await pair[0].quiet()


async def test_a_full_engine_neither_waits_for_room_again_nor_promises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asynckv.connectors.p2p.routes._FULL_AFTER_S", 0.0)
    async with pair_of(save_timeout_s=60) as pair:
        buffer = buffer_of(worker_of(pair[0]))
        full = torch.zeros(buffer.statistics().max_bytes - 65536, dtype=torch.uint8)
        await buffer.insert([1], None, full, None, None)
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
        asked = {"do_remote_prefill": True, "transfer_id": "t"}
        last = await pair[1].generate(
            prompt(), request_id="d", kv_transfer_params=asked
        )
        assert last.tokens == MODEL.generate(prompt(), 1)
        assert "there is no room here" in pair[1].failures["d"]


@pytest.mark.parametrize("is_full", [True, False])
async def test_one_rank_that_is_full_keeps_its_engine_from_promising_for_now(
    is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose save failed for another reason does not."""

    async def fail() -> LookupBuffer:
        raise OSError("for another reason")

    monkeypatch.setattr("asynckv.connectors.p2p.scheduler._FULL_S", 600.0)
    async with pair_of(toy_shape(MODEL, tp_size=2), save_timeout_s=0.01) as pair:
        ranks = [worker_of(pair[0], rank) for rank in range(2)]
        buffer = buffer_of(ranks[1])
        if is_full:
            room = buffer.statistics().max_bytes - 8  # its token takes some
            full = torch.zeros(room, dtype=torch.uint8)
            await buffer.insert([1], None, full, None, None, entry_id="full")
        with monkeypatch.context() as patch:
            if not is_full:
                patch.setattr(
                    ranks[1].routes, "targets", lambda order: [(fail, "t", 1)]
                )
            run = functools.partial(pair[0].generate, kv_transfer_params=PREFILL)
            await run(prompt(), request_id="p")
            await until(lambda: not any(one.statistics().saving for one in ranks))
        await buffer.withdraw("full")
        output = await run(prompt(seed=2), request_id="q")
        assert (output.kv_transfer_params is None) is is_full


async def test_requests_that_save_one_transfer_leave_one_entry() -> None:
    async with pair_of() as pair:
        named = {**PREFILL, "transfer_id": "t"}
        for name in ("p", "q"):
            output = await pair[0].generate(
                prompt(), request_id=name, kv_transfer_params=named
            )
            assert output.kv_transfer_params is not None
        assert buffer_of(worker_of(pair[0])).statistics().entries == 1


@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_samples_of_a_prompt_leave_one_entry_that_any_of_them_names(
    direction: str,
) -> None:
    async with pair_of(direction=direction) as pair:
        tokens, decode = prompt(), pair[1].generate
        buffer = buffer_of(worker_of(pair[direction == "push"]))
        first, *_, last = [
            await pair[0].generate(
                *(tokens, 1),
                request_id=f"{number}_p",
                parent_id="p",
                kv_transfer_params=PREFILL,
            )
            for number in range(3)
        ]
        params = last.kv_transfer_params
        assert params is not None and first.kv_transfer_params == params
        assert buffer.statistics().entries == 1
        decoded = await decode(tokens, 2, request_id="d", kv_transfer_params=params)
        assert decoded.external_tokens == 70
        assert decoded.tokens == MODEL.generate(tokens, 2)
        await all_quiet(pair)


@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_who_decodes_learns_at_once_that_prefill_had_no_room(
    direction: str,
) -> None:
    async with pair_of(save_timeout_s=0.01, direction=direction) as pair:
        buffer = buffer_of(worker_of(pair[direction == "push"]))
        full = torch.zeros(buffer.statistics().max_bytes - 65536, dtype=torch.uint8)
        await buffer.insert([1], None, full, None, None)
        params = {**PREFILL, "transfer_id": "t"}
        await pair[0].generate(prompt(), request_id="p", kv_transfer_params=params)
        params = {"do_remote_prefill": True, "transfer_id": "t"}
        last = await pair[1].generate(
            prompt(), 2, request_id="d", kv_transfer_params=params
        )
        assert last.tokens == MODEL.generate(prompt(), 2)
        assert "has not saved it: it took longer than 0.01 s" in pair[1].failures["d"]
        assert buffer.statistics().entries == 1


def worker_alone(name: str) -> P2PWorker:
    config = pair_configs([f"mem://{name}"], ["mem://nobody"], {"direction": "pull"})[0]
    shape = toy_shape(MODEL)
    return P2PWorker(config, KVEngine(engine_id="P", block_size=16, shape=shape))


def caches() -> dict[str, torch.Tensor]:
    return {layer: torch.ones(2, 8, 16, 4, 8) for layer in MODEL.layer_names}


async def test_after_wait_for_save_the_blocks_may_be_overwritten() -> None:
    worker, kv = worker_alone("alone"), caches()
    worker.register_kv_caches(kv)
    async with worker:
        await worker.start()
        worker.bind_connector_metadata(
            P2PMetadata(saves=(SaveOrder("r", "t", "", (1, 2, 3), ((4,),), b"salt"),))
        )
        await worker.start_load_kv()
        for layer in kv:
            worker.save_kv_layer(layer, kv[layer])
            worker.save_kv_layer("no such layer")
        await worker.wait_for_save()
        for cache in kv.values():
            cache.zero_()
        async with buffer_of(worker).drop_select(entry_id="t") as entry:
            assert isinstance(entry.value, dict)
            assert all(bool((tensor == 1).all()) for tensor in entry.value.values())
            assert EntryHeader.of(entry.extras["asynckv"]).salt == b"salt"
        await until(lambda: not worker.statistics().saving)
        assert worker.get_finished().finished_sending == {"r"}


async def test_what_is_refused_is_not_saved_and_who_waits_learns_why() -> None:
    worker = worker_alone("alone-five")
    worker.register_kv_caches(caches())
    order = SaveOrder("r", "t", "", (1, 2, 3), ((4,),), refusal="too large")
    async with worker:
        await worker.start()
        worker.bind_connector_metadata(P2PMetadata(saves=(order,)))
        await worker.start_load_kv()
        await worker.wait_for_save()
        async with buffer_of(worker).drop_select(entry_id="t") as entry:
            assert EntryHeader.of(entry.extras["asynckv"]).failure == "too large"
            assert not entry.key
        assert not worker.get_finished()


async def test_start_load_kv_returns_whatever_the_peer_does() -> None:
    worker = worker_alone("alone-too")
    worker.register_kv_caches(caches())
    order = LoadOrder("r", "t", "D", ((1,),), num_tokens=3, is_async=False)
    async with worker:
        worker.bind_connector_metadata(P2PMetadata(loads=(order,)))
        await worker.start_load_kv()
        await worker.start_load_kv()
        assert worker.statistics().loading == 1
        await worker.wait_for_layer_load(MODEL.layer_names[0])
        results = worker.get_finished()
        assert results.failed_recving == {"r"}
        assert results.invalid_block_ids == {1}


async def test_a_load_that_cannot_begin_fails_and_those_after_it_begin() -> None:
    worker = worker_alone("alone-six")
    worker.register_kv_caches(caches())
    begin, orders = (
        worker._loading._begin,
        [LoadOrder(n, n, "D", ((1,),)) for n in "ab"],
    )

    def begin_some(order: LoadOrder) -> None:
        if order.request_id == "a":
            raise ArithmeticError("nobody thought of this")
        begin(order)

    worker._loading._begin = begin_some  # type: ignore[method-assign]
    async with worker:
        worker.bind_connector_metadata(P2PMetadata(loads=tuple(orders)))
        await worker.start_load_kv()
        results = worker.get_finished()
        assert results.failed_recving == results.finished_recving == {"a"}
        assert results.invalid_block_ids == {1}
        assert results.reasons["a"] == "ArithmeticError: nobody thought of this"
        assert worker.statistics().loading == 1


async def test_orders_of_another_connector_are_refused() -> None:
    worker = worker_alone("alone-three")
    async with worker:
        with pytest.raises(TypeError, match="another connector"):
            worker.bind_connector_metadata(KVConnectorMetadata())
        with pytest.raises(RuntimeError, match="register_kv_caches"):
            worker.bind_connector_metadata(
                P2PMetadata(saves=(SaveOrder("r", "t", "", (1,), ((0,),)),))
            )


async def test_a_cancelled_wait_for_save_leaves_the_save_as_it_is() -> None:
    worker, kv = worker_alone("alone-four"), caches()
    worker.register_kv_caches(kv)
    async with worker:
        await worker.start()
        worker.bind_connector_metadata(
            P2PMetadata(saves=(SaveOrder("r", "t", "", (1, 2, 3), ((4,),)),))
        )
        waiting = asyncio.create_task(worker.wait_for_save())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        await worker.wait_for_save()
        await until(lambda: not worker.statistics().saving)
        assert worker.get_finished().failed_sending == frozenset()
        assert await buffer_of(worker).peek([1, 2, 3]) == 3


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
                assert (await working)[0] == MODEL.generate(tokens, 3)

        for start in range(0, 200, 8):
            async with asyncio.TaskGroup() as group:
                for number in range(start, start + 8):
                    group.create_task(one(number))
        for engine in pair:
            async with asyncio.timeout(10):
                await engine.quiet()
            assert engine.unknown_completions == 0


@pytest.mark.parametrize(
    ("role", "direction", "is_awaited"),
    [
        ("kv_both", "push", True),
        ("kv_consumer", "push", False),
        ("kv_producer", "pull", False),
    ],
)
async def test_a_start_gets_a_gpu_ready_that_is_pushed_from_before_all_else(
    monkeypatch: pytest.MonkeyPatch, role: KVRole, direction: str, is_awaited: bool
) -> None:
    async def never(moves: BlockMoves) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(BlockMoves, "open", never)
    worker, _ = worker_on("fake", role, "mem://start", direction=direction)
    async with worker:
        starting = asyncio.create_task(worker.start())
        if is_awaited:
            await until_blocked(starting)
            starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled() is is_awaited
        assert (worker.routes.server is None) is is_awaited


def test_a_worker_is_one_loops() -> None:
    config = pair_configs(["mem://one-loop"], ["mem://no"], {"direction": "pull"})[0]
    worker = P2PWorker(config, KVEngine(engine_id="P", block_size=16))

    async def use() -> None:
        worker.get_finished()

    async def misuse() -> None:
        for call in (worker.start, worker.wait_for_save, worker.start_load_kv):
            with pytest.raises(WrongLoop):
                await call()
        with pytest.raises(WrongLoop):
            await worker.wait_for_layer_load("a")
        with pytest.raises(WrongLoop):
            worker.bind_connector_metadata(P2PMetadata())
        with pytest.raises(WrongLoop):
            worker.clear_connector_metadata()
        with pytest.raises(WrongLoop):
            worker.save_kv_layer("a")

    asyncio.run(use())
    asyncio.run(misuse())
    worker.abort()


def test_buffers_are_where_the_caches_are_or_were_said_to_be() -> None:
    def worker_of(device: str, local_rank: int | None = None, **on: Any) -> P2PWorker:
        config = KVTransferConfig(
            kv_role="kv_both",
            kv_buffer_device=device,
            kv_connector_extra_config={"local_rank": local_rank} if local_rank else {},
        )
        return P2PWorker(config, KVEngine(engine_id="E", block_size=16), **on)

    assert worker_of("cpu")._buffer_device() is None
    by_rank, by_name = worker_of("cuda", 3), worker_of("cuda:3")
    assert by_rank._buffer_device() == by_name._buffer_device() == Device(3)
    with fake_device() as gpu:
        worker = worker_of("cuda", lanes=lanes_of(gpu))
        worker.register_kv_caches({"a": gpu.tensor(torch.zeros(4, 16, 2))})
        assert worker._buffer_device() == Device(0)
        worker.abort()
