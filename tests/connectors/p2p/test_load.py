"""A peer that is gone fails what waits for it, at once, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from asynckv.abc import SelectStream
from asynckv.buffers.local.writer import LocalViews
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import serve
from asynckv.connectors.caches import BlockMoves, PagedCaches
from asynckv.connectors.engine import (
    HEADER,
    EntryHeader,
    KVEngine,
    NotSaved,
    prompt_digest,
)
from asynckv.connectors.options import Direction
from asynckv.connectors.p2p.entries import (
    WholeEntry,
    open_entry,
    release,
    report_failure,
)
from asynckv.connectors.p2p.load import Assembly, P2PLoad, P2PLoading
from asynckv.connectors.requests import LoadRequest, P2PMetadata
from asynckv.devices.copying import CopyPool
from asynckv.errors import IncompatiblePeer
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.types import TensorSpec
from harness.cancellations.connectors.grounds import (
    P2PGround,
    open_p2p,
    until_loaded,
    until_saved,
)
from harness.engines.toy_parts import ToyParts, open_toy_parts
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import GpuPair, open_gpu_pair

TOKENS = list(range(6))
ENGINE = KVEngine(engine_id="E", block_size=4)

ORDER = LoadRequest(
    "r", "t", "", ((3, 1),), num_tokens=6, digest=prompt_digest(TOKENS, 6)
)


def header_of(block_size: int = 4, salt: bytes = b"") -> torch.Tensor:
    return EntryHeader(
        engine_id="P", rank=0, block_size=block_size, layers=("a", "b"), salt=salt
    ).tensor()


SPECS = {
    HEADER: TensorSpec(tuple(header_of().shape), "uint8"),
    **{name: TensorSpec((2, 5), "float32") for name in ("a.key", "b.key")},
}


async def insert(
    buffer: LookupBuffer,
    kv: dict[str, torch.Tensor] | None = None,
    tokens: Sequence[int] = TOKENS,
    header: torch.Tensor | None = None,
) -> None:
    """Insert an entry of a connector's: all that is asked for, unless it is said."""
    kv = kv or {layer: torch.ones(2, 5) for layer in "ab"}
    extras = {HEADER.removeprefix("extras."): header_of() if header is None else header}
    await buffer.insert(tokens, None, kv, None, None, extras=extras, entry_id="t")


def load_of(timeout_s: float = 5) -> tuple[P2PLoad, PagedCaches]:
    pools = {layer: torch.zeros(8, 5) for layer in "ab"}
    caches = PagedCaches(pools, None)
    moves = BlockMoves(caches, CopyPool())
    return P2PLoad(ENGINE, moves, ORDER, timeout_s), caches


async def run(load: P2PLoad, buffer: LookupBuffer) -> None:
    async def find() -> LookupBuffer:
        return buffer

    await load.run({0: None}, {0: (find, "t")})


async def test_a_layer_is_there_before_the_next_has_come() -> None:
    load, caches = load_of()
    async with LookupBuffer("16MiB") as buffer:
        loading = asyncio.create_task(run(load, buffer))
        async with buffer.open_insert(TOKENS, None, SPECS, entry_id="t") as writer:
            await writer.put(HEADER, header_of())
            await writer.put("b.key", torch.ones(2, 5))
            await load.wait_for("b")
            assert caches.pools("b")[0][[3, 1]].eq(1).all()
            assert not caches.pools("a")[0].any()
            await writer.put("a.key", torch.ones(2, 5))
        await loading
        await load.wait_for("a")
        assert load.untaken_sources == ()


async def test_a_layer_without_a_cache_of_its_own_is_there_when_all_is() -> None:
    load, _ = load_of()
    async with LookupBuffer("16MiB") as buffer:
        loading = asyncio.create_task(run(load, buffer))
        async with buffer.open_insert(TOKENS, None, SPECS, entry_id="t") as writer:
            await writer.put(HEADER, header_of())
            await until(lambda: load.has_begun)
            waiting = asyncio.create_task(load.wait_for("c"))
            await writer.put("a.key", torch.ones(2, 5))
            await load.wait_for("a")
            assert not waiting.done()
            await writer.put("b.key", torch.ones(2, 5))
        await asyncio.gather(waiting, loading)


@pytest.mark.parametrize(
    ("tokens", "block_size", "shape", "salt"),
    [
        ([9, *TOKENS], 4, (2, 5), b""),
        (TOKENS, 8, (2, 5), b""),
        (TOKENS, 4, (1, 5), b""),
        (TOKENS, 4, (2, 5), b"another's"),
    ],
)
async def test_what_is_of_no_use_is_acknowledged_and_what_is_not_ours_given_back(
    tokens: list[int], block_size: int, shape: tuple[int, int], salt: bytes
) -> None:
    load, caches = load_of()
    async with LookupBuffer("16MiB") as buffer:
        kv = {layer: torch.ones(shape) for layer in "ab"}
        await insert(buffer, kv, tokens, header_of(block_size, salt))
        with pytest.raises(IncompatiblePeer):
            await run(load, buffer)
        await load.wait_for("a")
        assert await buffer.withdraw("t") == (tokens != TOKENS)
        assert buffer.statistics().entries == 0
        assert load.untaken_sources == ()
        assert not caches.pools("a")[0].any()


async def test_what_was_not_saved_fails_at_once_and_is_let_go() -> None:
    load, _ = load_of()
    async with LookupBuffer("16MiB") as buffer:

        async def find() -> LookupBuffer:
            return buffer

        header = EntryHeader(engine_id="P", rank=0, block_size=4, layers=())
        await report_failure((find, "t", 1), TOKENS, header, "no room", 60)
        with pytest.raises(NotSaved, match="P/0 has not saved it: no room"):
            await run(load, buffer)
        assert buffer.statistics().entries == 0


async def test_a_cancelled_load_says_what_it_left_where() -> None:
    load, _ = load_of()
    async with LookupBuffer("16MiB") as buffer:
        loading = asyncio.create_task(run(load, buffer))
        await asyncio.sleep(0)
        loading.cancel()
        await asyncio.wait([loading])
        (source,) = load.untaken_sources
        await buffer.insert(TOKENS, None, torch.ones(3), None, None, entry_id="t")
        other = msgspec.structs.replace(ORDER, digest=prompt_digest([7], 1))
        with pytest.raises(IncompatiblePeer, match="another prompt"):
            await release(source, other, 5)
        assert buffer.statistics().entries == 1
        await release(source, ORDER, 5)
        assert buffer.statistics().entries == 0


async def test_nothing_is_waited_for_longer_than_it_may_take() -> None:
    load, _ = load_of(timeout_s=0.01)
    async with LookupBuffer("16MiB") as buffer:
        with pytest.raises(TimeoutError, match=r"nothing came of t .* for 0.01 s: it"):
            await run(load, buffer)


async def test_an_entry_that_lacks_a_layer_is_no_success(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for layers in ("a", "ab"):
        async with LookupBuffer("16MiB") as buffer:
            load, _ = load_of()
            await insert(buffer, {layer: torch.ones(2, 5) for layer in layers})
            with pytest.raises(IncompatiblePeer):
                await run(load, buffer)
            # Whatever an entry says that it has: what did not land is missed.
            monkeypatch.setattr(Assembly, "land", lambda *_: None)


def has_given(buffer: LookupBuffer, count: int) -> bool:
    return buffer.statistics().acknowledged == count


async def test_a_layer_is_there_when_all_ranks_have_brought_their_part() -> None:
    async with open_p2p("mem", "pull", sizes=(2, 1)) as ground:
        first, second = ground.prefill.workers
        (decode,), (caches,) = ground.decode.workers, ground.decode.caches
        caches.spoil()
        last = ground.model.layer_names[-1]
        save = P2PMetadata(saves=(ground.save_request(name := ground.new_name()),))
        for rank in ground.prefill.caches:
            rank.compute()
        await ground.begin_load(ground.load_request(name, is_async=False))
        waiting = asyncio.create_task(decode.wait_for_layer_load(last))
        for worker in (first, second):
            assert not waiting.done()
            worker.bind_connector_metadata(save)
            await worker.wait_for_save()
            buffer = ground.buffers()["P", worker.engine.rank]
            await until(functools.partial(has_given, buffer, 2))
        await waiting
        caches.expect_computed()


async def test_a_load_may_take_any_time_while_something_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, late_s = asyncio.get_running_loop(), 0.0
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + late_s)
    load, _ = load_of(timeout_s=100)
    async with LookupBuffer("16MiB") as buffer:
        loading = asyncio.create_task(run(load, buffer))
        async with buffer.open_insert(TOKENS, None, SPECS, entry_id="t") as writer:
            await until_blocked(loading)
            await writer.put(HEADER, header_of())
            for layer in "ab":
                late_s += 60
                for _ in range(3):
                    await asyncio.sleep(0)
                await writer.put(f"{layer}.key", torch.ones(2, 5))
                await load.wait_for(layer)
        await loading


async def test_an_entry_that_was_acknowledged_is_not_released_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its answer does not come: it was taken all the same."""
    loop, late_s = asyncio.get_running_loop(), 0.0
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + late_s)
    left = asyncio.Event()

    class Unanswered(LookupBuffer):
        @contextlib.asynccontextmanager
        async def open_drop_select(
            self, *args: Any, **kwargs: Any
        ) -> AsyncIterator[SelectStream]:
            async with super().open_drop_select(*args, **kwargs) as stream:
                yield stream
            left.set()
            await asyncio.Event().wait()

    load, _ = load_of(timeout_s=100)
    async with Unanswered("16MiB", drain_s=0) as buffer:
        await insert(buffer)
        loading = asyncio.create_task(run(load, buffer))
        await left.wait()
        late_s = 200.0
        with pytest.raises(TimeoutError):
            await loading
        assert load.untaken_sources == ()


@pytest.fixture
async def pair(gpus: FakeGpus) -> AsyncIterator[GpuPair]:
    async with open_gpu_pair(gpus) as pair:
        await pair.buffer.insert(
            [1], None, {"a": noise(MIB)}, None, noise(8), entry_id="e"
        )
        yield pair


async def test_on_the_same_gpu_its_tensors_are_views(pair: GpuPair) -> None:
    async with open_entry(pair.peer.lookup, "e") as entry:
        assert isinstance(entry, WholeEntry)
        found = {name: one.is_cuda async for name, one in entry}
        assert found == {"a.key": True, "hidden": True} == dict.fromkeys(found, True)
        assert is_same((await entry.wait_for("a.key")).cpu(), noise(MIB))
        assert entry.specs["a.key"].nbytes == MIB and pair.peer.on_gpu is not None
        assert not pair.peer.on_gpu.arena.used_bytes
    await until(lambda: not pair.buffer.statistics().used_bytes)


async def test_elsewhere_it_comes_as_it_lands() -> None:
    async with LookupBuffer("4MiB") as buffer:
        await buffer.insert([1], None, noise(8), None, None, entry_id="e")
        async with open_entry(buffer, "e") as entry:
            assert not isinstance(entry, WholeEntry)
            assert is_same(await entry.wait_for("key"), noise(8))
        assert not buffer.statistics().entries


async def test_on_the_buffers_own_gpu_it_is_seen_as_it_lands(pair: GpuPair) -> None:
    async with open_entry(pair.buffer, "e") as entry:
        assert isinstance(entry, LocalViews)
        assert is_same((await entry.wait_for("a.key")).cpu(), noise(MIB))
    assert not pair.buffer.statistics().used_bytes


async def read_and_fail(entry: SelectStream) -> None:
    kept = await entry.wait_for("a.key")
    raise ValueError(f"no use for {kept.nbytes} bytes")


@pytest.mark.parametrize("is_own", [True, False])
async def test_an_error_that_is_kept_keeps_no_memory(
    pair: GpuPair, is_own: bool
) -> None:
    buffer = pair.buffer if is_own else pair.peer.lookup
    with pytest.raises(ValueError, match="no use") as kept:
        async with open_entry(buffer, "e") as entry:
            await read_and_fail(entry)
    await until(lambda: not pair.buffer.statistics().leased)
    assert await pair.buffer.withdraw("e")
    await until(lambda: not pair.buffer.statistics().used_bytes)
    assert kept.value.__traceback__ is not None


async def test_an_error_of_who_has_copies_is_left_as_it_is() -> None:
    async with LookupBuffer("4MiB") as buffer:
        await buffer.insert([1], None, {"a": noise(8)}, None, None, entry_id="e")
        with pytest.raises(ValueError, match="no use") as kept:
            async with open_entry(buffer, "e") as entry:
                await read_and_fail(entry)
        assert "kept" in kept.traceback[-1].locals
        assert await buffer.withdraw("e")


AWAITED = LoadRequest("r", "t", "P", ((1, 2),), is_async=False)


@pytest.fixture
async def parts() -> AsyncIterator[ToyParts]:
    async with open_toy_parts("D") as parts:
        yield parts


@pytest.fixture
def loading(parts: ToyParts) -> P2PLoading:
    return P2PLoading(*parts.all, moves=parts.moves)


async def test_a_load_that_cannot_begin_fails_and_nothing_is_raised(
    loading: P2PLoading, parts: ToyParts
) -> None:
    parts.registered = None
    loading.begin(AWAITED)
    results = parts.transfers.results()
    assert results.failed_recving == {"r"}
    assert results.invalid_block_ids == {1, 2}
    assert loading.awaited == ()


async def test_a_step_waits_for_its_loads_until_it_is_over(
    loading: P2PLoading, parts: ToyParts
) -> None:
    loading.begin(AWAITED)
    assert [load.request for load in loading.awaited] == [AWAITED]
    loading.clear()
    assert loading.awaited == ()
    assert parts.transfers.count("recv") == 1


async def test_what_nobody_loads_is_released_beside_the_loads(
    loading: P2PLoading, parts: ToyParts
) -> None:
    loading.begin(LoadRequest("r", "t", "P", ()))
    assert (parts.transfers.count("recv"), parts.transfers.others) == (0, 1)
    await until(lambda: not parts.transfers.others)  # nobody serves there


async def test_a_request_is_loaded_once_at_a_time(
    loading: P2PLoading, parts: ToyParts
) -> None:
    for _ in range(2):
        loading.begin(AWAITED)
    assert len(loading.awaited) == 1
    assert parts.transfers.count("recv") == 1


async def test_a_load_fails_with_the_rank_that_it_is_from_and_no_other(
    parts: ToyParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Callable[[str], None]] = []
    monkeypatch.setattr(parts.routes, "call_when_lost", told.append)
    options = msgspec.structs.replace(parts.options, direction="push")
    loading = P2PLoading(parts.engine, options, *parts.all[2:], moves=parts.moves)
    async with serve("mem://toy-parts-P", lookup=LookupBuffer(), identity="P/0"):
        loading.begin(AWAITED)
        await until(lambda: all(load.has_begun for load in loading.awaited))
        for lost in ("Q/0", "P/1"):
            told[0](lost)
            assert not parts.transfers.results().failed_recving
        told[0]("P/0")
        await until(lambda: not parts.transfers.count("recv"))
        results = parts.transfers.results()
        assert results.failed_recving == {"r"} and "P/0 is gone" in results.reasons["r"]
        await parts.transfers.aclose()
        await parts.routes.peers.aclose()


async def begin_load(ground: P2PGround) -> LoadRequest:
    order = ground.load_request(ground.new_name())
    await ground.begin_load(order)
    assert ground.decode.workers[0].statistics().loading == 1
    return order


async def expect_failed(ground: P2PGround, order: LoadRequest) -> None:
    for worker in ground.decode.workers:
        await until_loaded(worker)
        results = worker.get_finished()
        assert results.failed_recving == {order.request_id}
        assert results.invalid_block_ids == {*order.block_ids[0]}
        assert results.reasons[order.request_id].startswith(
            ("PeerLost", "EntryAborted", "BufferClosed")
        )


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_loads_of_a_rank_that_dies_fail_with_their_blocks(
    direction: Direction, sizes: tuple[int, int]
) -> None:
    async with open_p2p("tcp", direction, sizes) as ground:
        order = await begin_load(ground)
        ground.prefill.workers[-1].routes.abort()
        await expect_failed(ground, order)


def without_peer(ground: P2PGround) -> LoadRequest:
    return msgspec.structs.replace(ground.load_request(ground.new_name()), peer="")


async def test_a_load_that_names_no_peer_fails_with_the_last_that_may_send() -> None:
    async with open_p2p("tcp", "push") as ground:
        server = ground.decode.workers[0].routes.server
        assert server is not None
        async with connect(server.url, identity="Q/1"):  # sends another rank's part
            order = without_peer(ground)
            await ground.begin_load(order)
            ground.prefill.workers[0].routes.abort()
            await expect_failed(ground, order)


async def test_a_load_that_names_no_peer_waits_for_those_that_are_left() -> None:
    async with open_p2p("tcp", "push") as ground, another_prefill(ground) as left:
        await left.hand_over()
        ground.decode.caches[0].spoil()
        order = without_peer(ground)
        await ground.begin_load(order)
        links = ground.decode.workers[0].statistics().links
        ground.prefill.workers[0].routes.abort()
        await until(lambda: ground.decode.workers[0].statistics().links < links)
        await left.save(order.transfer_id)
        await ground.end_load(order)


@contextlib.asynccontextmanager
async def another_prefill(ground: P2PGround) -> AsyncIterator[P2PGround]:
    """Yield the same with Q for P, beside it."""
    side = ground.prefill
    engine = msgspec.structs.replace(side.workers[0].engine, engine_id="Q")
    async with side.new_worker(side.config, engine) as worker:
        worker.register_kv_caches(side.caches[0].layers)
        await worker.start()
        prefill = dataclasses.replace(side, workers=(worker,))
        yield dataclasses.replace(ground, prefill=prefill)


async def test_what_a_peer_had_sent_before_it_died_is_loaded() -> None:
    async with open_p2p("mem", "push") as ground:
        name = ground.new_name()
        await ground.save(name)
        ground.prefill.workers[0].routes.abort()
        await ground.load(name)


async def test_a_peer_that_is_sending_fails_what_it_has_begun() -> None:
    async with open_p2p("unix", "push") as ground:
        order = await begin_load(ground)
        worker = ground.prefill.workers[0]
        save = ground.save_request(order.transfer_id)
        worker.bind_connector_metadata(P2PMetadata(saves=(save,)))
        worker.save_kv_layer(ground.model.layer_names[0])
        (load,) = ground.decode.workers[0]._loading._loads
        await until(lambda: load.unseen_rank("P/0") is None)
        worker.routes.abort()
        await worker.wait_for_save()
        await until_saved(worker)
        assert worker.get_finished().failed_sending == {save.request_id}
        await expect_failed(ground, order)
