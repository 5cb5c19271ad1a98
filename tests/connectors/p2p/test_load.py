from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import torch

from asynckv.abc import SelectStream
from asynckv.buffers.lookup import LookupBuffer
from asynckv.connectors.assembly import Assembly
from asynckv.connectors.caches import BlockMoves, PagedCaches
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.keys import HEADER, EntryHeader, NotSaved, prompt_digest
from asynckv.connectors.p2p.load import P2PLoad, release
from asynckv.connectors.p2p.save import report_failure
from asynckv.connectors.requests import LoadOrder, P2PMetadata
from asynckv.devices.copying import CopyPool
from asynckv.errors import IncompatiblePeer
from asynckv.testing.blocked import until, until_blocked
from asynckv.types import TensorSpec
from harness.cancellations.connectors.grounds import open_p2p

TOKENS = list(range(6))
ENGINE = KVEngine(engine_id="E", block_size=4)
ORDER = LoadOrder(
    "r", "t", "", ((3, 1),), num_tokens=6, digest=prompt_digest(TOKENS, 6)
)
SPECS = {name: TensorSpec((2, 5), "float32") for name in ("a.key", "b.key")}


def header_of(block_size: int = 4, salt: bytes = b"") -> torch.Tensor:
    return EntryHeader(
        engine_id="P", rank=0, block_size=block_size, layers=("a", "b"), salt=salt
    ).tensor()


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
        specs = {HEADER: TensorSpec(tuple(header_of().shape), "uint8"), **SPECS}
        async with buffer.open_insert(TOKENS, None, specs, entry_id="t") as writer:
            await writer.put(HEADER, header_of())
            await writer.put("b.key", torch.ones(2, 5))
            await load.wait_for("b")
            assert caches.pools("b")[0][[3, 1]].eq(1).all()
            assert not caches.pools("a")[0].any()
            await writer.put("a.key", torch.ones(2, 5))
        await loading
        await load.wait_for("a")
        assert load.untaken_sources == ()


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
        extras = {"asynckv": header_of(block_size, salt)}
        await buffer.insert(tokens, None, kv, None, None, extras=extras, entry_id="t")
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
            kv = {layer: torch.ones(2, 5) for layer in layers}
            extras = {"asynckv": header_of()}
            await buffer.insert(
                TOKENS, None, kv, None, None, extras=extras, entry_id="t"
            )
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
        save = P2PMetadata(saves=(ground.save_order(name := ground.new_name()),))
        for rank in ground.prefill.caches:
            rank.compute()
        await ground.begin_load(ground.load_order(name, is_async=False))
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
        specs = {HEADER: TensorSpec(tuple(header_of().shape), "uint8"), **SPECS}
        async with buffer.open_insert(TOKENS, None, specs, entry_id="t") as writer:
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
        kv = {layer: torch.ones(2, 5) for layer in "ab"}
        extras = {"asynckv": header_of()}
        await buffer.insert(TOKENS, None, kv, None, None, extras=extras, entry_id="t")
        loading = asyncio.create_task(run(load, buffer))
        await left.wait()
        late_s = 200.0
        with pytest.raises(TimeoutError):
            await loading
        assert load.untaken_sources == ()
