"""Links that are cut, and what goes on at the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import Server, serve
from asynckv.errors import PeerLost, PeerRestarted
from asynckv.links.link import Link
from asynckv.protocol.frames import Accepted
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.pairs import Peers
from harness.buffer_fixtures import CutWhen

FarLink = Callable[[Server, Peer], Link]


async def test_waiting_calls_go_on_after_a_cut(
    peers: Peers, local: LookupBuffer
) -> None:
    lookup = peers.consumer.lookup
    calls = [asyncio.create_task(lookup.drop_select([n])) for n in (1, 2)]
    await until(lambda: local.statistics().waiting_selects == 2)
    (await peers.consumer.link()).abort()
    await until(lambda: not peers.consumer.is_connected)
    await local.insert([2], None, torch.ones(3), None, None)
    assert (await calls[1]).matched_tokens == 1
    await until(lambda: local.statistics().waiting_selects == 1)
    calls[0].cancel()
    await until(lambda: local.statistics().waiting_selects == 0)


async def test_a_lost_link_and_the_next_one_are_logged_as_warnings(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    (await peers.consumer.link()).abort()
    await until(lambda: not peers.consumer.is_connected)
    await peers.consumer.link()
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    url = peers.server.url
    assert f"the link to {url} was lost; dialling again" in said
    assert f"connected again to {url}" in said


async def test_a_peer_that_says_goodbye_is_not_called_again(
    local: LookupBuffer,
) -> None:
    async with serve("mem://", lookup=local) as server:
        async with connect(server.url) as peer:
            call = asyncio.create_task(peer.lookup.drop_select([1]))
            await until_blocked(call)
            await server.aclose()
            with pytest.raises(PeerLost, match="goodbye"):
                await call
            with pytest.raises(PeerLost, match="goodbye"):
                await peer.lookup.peek([1])


async def test_a_peer_that_does_not_come_back_in_time_is_lost(
    local: LookupBuffer,
) -> None:
    async with serve("mem://", lookup=local) as server:
        async with connect(server.url, reconnect_s=0.05) as peer:
            calls = [
                asyncio.create_task(peer.lookup.insert([1], None, key, None, None))
                for key in (torch.ones(8 * 2**20), torch.ones(2**19))
            ]
            select = asyncio.create_task(peer.lookup.drop_select([7]))
            await until(lambda: local.statistics().waiting_selects == 1)
            server.abort()
            with pytest.raises(PeerLost, match="could not be reached again"):
                await select
            await asyncio.gather(*calls, return_exceptions=True)


@pytest.fixture
async def restarted() -> AsyncIterator[tuple[LookupBuffer, LookupBuffer]]:
    async with LookupBuffer("8MiB", drain_s=0) as old, LookupBuffer(drain_s=0) as new:
        yield old, new


async def test_a_waiting_select_goes_on_at_a_server_that_came_back_empty(
    restarted: tuple[LookupBuffer, LookupBuffer],
) -> None:
    old, new = restarted
    async with serve("mem://", lookup=old) as first, connect(first.url) as peer:
        call = asyncio.create_task(peer.lookup.drop_select([1]))
        await until(lambda: old.statistics().waiting_selects == 1)
        first.abort()
        async with serve(first.url, lookup=new):
            await new.insert([1], None, None, None, None, entry_id="new")
            assert (await call).entry_id == "new"


async def test_an_insert_that_waits_for_room_goes_on_at_a_server_that_came_back_empty(
    restarted: tuple[LookupBuffer, LookupBuffer],
) -> None:
    old, new = restarted
    await old.insert([7], None, torch.ones(2**21 - 100), None, None)
    async with serve("mem://", lookup=old) as first, connect(first.url) as peer:
        insert = peer.lookup.insert([1], None, torch.ones(2**20), None, None)
        call = asyncio.create_task(insert)
        await until(lambda: old.statistics().waiting_inserts == 1)
        first.abort()
        async with serve(first.url, lookup=new):
            entry_id = await call
            assert (await new.drop_select([1])).entry_id == entry_id


@pytest.mark.parametrize("nbytes", [10, 2**20])
async def test_an_insert_that_a_server_without_its_memory_may_have_had_is_told(
    restarted: tuple[LookupBuffer, LookupBuffer],
    cut_when: CutWhen,
    far_link: FarLink,
    nbytes: int,
) -> None:
    old, new = restarted
    async with serve("mem://", lookup=old) as first, connect(first.url) as peer:
        ended = asyncio.Event()

        def end() -> None:
            first.abort()
            ended.set()

        cut_when(far_link(first, peer), Accepted, end)
        call = asyncio.create_task(
            peer.lookup.insert([1], None, torch.ones(nbytes), None, None)
        )
        await ended.wait()
        async with serve(first.url, lookup=new):
            with pytest.raises(PeerRestarted):
                await call
            assert not new.statistics().inserted


async def test_a_server_that_came_back_as_another_refuses(local: LookupBuffer) -> None:
    async with LookupBuffer(fingerprint="b", drain_s=0) as other:
        async with (
            serve("mem://", lookup=local) as first,
            connect(first.url, fingerprint="a") as peer,
        ):
            call = asyncio.create_task(peer.lookup.drop_select([1]))
            await until(lambda: local.statistics().waiting_selects == 1)
            first.abort()
            async with serve(first.url, lookup=other):
                with pytest.raises(PeerLost, match="refuses this peer now"):
                    await call
