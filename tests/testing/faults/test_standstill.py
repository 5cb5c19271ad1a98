"""Payload that stands still, consumers that only ping, answers that are lost."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import torch

import asynckv
from asynckv.protocol.frames import (
    Insert,
    Offer,
    Select,
)
from asynckv.protocol.transfer_frames import Grant
from asynckv.testing.faults.hostile import claim, open_hostile_peer
from asynckv.testing.faults.proxy import Proxy
from asynckv.testing.pairs import KVFaults, KVPair, open_kv_faults, open_kv_pair

LARGE = torch.ones(100_000)
DEADLINES = ("ANSWER_S", "SILENCE_S", "STALL_S")


@pytest.fixture
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every deadline of 30 s be half a second."""
    for name, module in list(sys.modules.items()):
        for deadline in DEADLINES:
            if name.startswith("asynckv.") and hasattr(module, deadline):
                monkeypatch.setattr(module, deadline, 0.5)


@contextlib.asynccontextmanager
async def pipes() -> AsyncIterator[tuple[Proxy, asynckv.KVPipe, asynckv.KVPipe]]:
    async with (
        asynckv.listen_pipe("tcp://127.0.0.1:0") as listener,
        Proxy(listener.url, heartbeat_ms=100) as proxy,
        asynckv.open_pipe(proxy.url) as near,
    ):
        far = await listener.accept()
        try:
            yield proxy, near, far
        finally:
            far.abort()
            near.abort()


async def insert(pair: KVFaults) -> None:
    await pair.peer.lookup.insert([1], None, LARGE, None, None)


async def select(pair: KVFaults) -> object:
    await pair.lookup.insert([1], None, LARGE, None, None)
    return await pair.peer.lookup.drop_select([1])


async def put(pair: KVFaults) -> None:
    await pair.peer.store.put("name", LARGE)


async def get(pair: KVFaults) -> object:
    await pair.store.put("name", LARGE)
    return await pair.peer.store.get("name")


async def stream(pair: KVFaults) -> object:
    await pair.lookup.insert([1], None, LARGE, None, None)
    async with pair.peer.lookup.open_drop_select([1]) as stream:
        return [name async for name, _ in stream]


@pytest.mark.usefixtures("short_deadlines")
@pytest.mark.parametrize("call", [insert, select, put, get, stream])
async def test_payload_that_stops_on_a_live_link_is_not_waited_for_for_ever(
    call: Callable[[KVFaults], Awaitable[object]],
) -> None:
    async with open_kv_faults(heartbeat_ms=100, reconnect_s=0.2) as pair:
        with pair.black_hole(kind="lanes"), contextlib.suppress(asynckv.AsyncKVError):
            async with asyncio.timeout(3):
                await call(pair)


@pytest.mark.usefixtures("short_deadlines")
async def test_a_pipe_does_not_wait_for_ever_for_payload_that_stops() -> None:
    async with pipes() as (proxy, near, far):
        with proxy.black_hole(kind="lanes"):
            await near.send_tensor(LARGE)
            with pytest.raises(asynckv.PeerLost):
                async with asyncio.timeout(3):
                    await far.recv_tensor()
            with pytest.raises(asynckv.PipeBroken):
                await near.flush()


@pytest.fixture
async def pair() -> AsyncIterator[KVPair]:
    async with open_kv_pair("tcp", max_bytes="4MiB") as pair:
        yield pair


@pytest.mark.usefixtures("short_deadlines")
async def test_an_insert_that_stops_does_not_keep_a_consumer_from_another_entry(
    pair: KVPair,
) -> None:
    async with open_hostile_peer(pair.server.url) as hostile:
        await hostile.send(1, Insert("stopped", 1, False), claim(100_000, tokens=[5]))
        await hostile.expect(Grant)
        async with hostile.alive(), asyncio.timeout(3):
            selecting = asyncio.create_task(pair.peer.lookup.drop_select([5]))
            await pair.lookup.insert([5], None, torch.ones(2), None, None)
            await selecting


@pytest.mark.usefixtures("short_deadlines")
@pytest.mark.parametrize("numel", [2, 100_000])
async def test_a_consumer_that_only_pings_does_not_hold_an_entry_for_ever(
    numel: int,
) -> None:
    async with (
        asynckv.LookupBuffer("4MiB", drain_s=0, max_hold_s=0.2) as lookup,
        asynckv.serve("tcp://127.0.0.1:0", lookup=lookup) as server,
        open_hostile_peer(server.url) as hostile,
    ):
        await lookup.insert([1], None, torch.ones(numel), None, None)
        await hostile.send(1, Select(False))
        await hostile.expect(Offer)
        async with hostile.alive(), asyncio.timeout(3):
            await lookup.drop_select([1])


async def test_an_acknowledgement_that_counted_is_no_lost_lease() -> None:
    async with open_kv_faults() as pair:
        await pair.lookup.insert([1], None, torch.ones(2), None, None)
        async with pair.peer.lookup.drop_select([1]):
            # The Ack arrives; its answer does not.
            cut = pair.cut_after(0, direction="to_dialler", kind="control")
            cut.begin()
        assert pair.lookup.statistics().entries == 0
