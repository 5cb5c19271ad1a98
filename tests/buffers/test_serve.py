from __future__ import annotations

import asyncio
import gc
import logging
import math
import weakref
from typing import Any

import pytest
import torch

from asynckv import LookupBuffer, Peer, Server, StoreBuffer, connect, open_pipe, serve
from asynckv.errors import (
    BufferClosed,
    ConfigError,
    IncompatiblePeer,
    LeaseLost,
    NotServed,
    PeerLost,
)
from asynckv.links.dial import dial
from asynckv.protocol.values import Limits
from asynckv.testing import until
from asynckv.testing.lookup_checks.values import started
from asynckv.testing.pairs import Peers, Scheme, new_url
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
from harness.link_pairs import name_of

MIB = 2**20
HEARTBEAT_S = Limits().heartbeat_ms / 1000


async def test_leaving_finishes_deliveries_under_way(
    peers: Peers, local: LookupBuffer
) -> None:
    await local.insert([1], None, torch.ones(MIB), None, None)
    lookup = peers.consumer.lookup
    async with lookup.drop_select([1]):
        waiting = asyncio.create_task(lookup.drop_select([2]))
        await until(lambda: local.statistics().waiting_selects == 1)
        leaving = await started(peers.server.aclose())
        assert not leaving.done() and local.statistics().waiting_selects == 0
        with pytest.raises(BufferClosed, match="leaving"):
            await lookup.drop_select([1])
        await local.insert([2], None, None, None, None)
    await leaving
    with pytest.raises(PeerLost, match="goodbye"):
        await waiting
    assert local.statistics().entries == 1 and not local.is_closed


@pytest.mark.parametrize("who", ["server", "producer"])
async def test_leaving_does_not_wait_for_inserts_that_wait_for_room(
    peers: Peers, local: LookupBuffer, who: str
) -> None:
    await local.insert([1], None, torch.ones(3 * MIB // 2), None, None)
    insert = asyncio.create_task(
        peers.producer.lookup.insert([2], None, torch.ones(MIB), None, None)
    )
    await until(lambda: local.statistics().waiting_inserts == 1)
    async with asyncio.timeout(3):
        await getattr(peers, who).aclose()
    with pytest.raises(PeerLost):
        await insert
    await until(lambda: len(peers.server._services) == (who == "producer"))
    await until(lambda: not local.statistics().waiting_inserts)


@pytest.mark.both_loops
async def test_calls_go_on_when_a_link_has_used_up_its_streams(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynckv.protocol.session.MAX_STREAM", 7)
    lookup, tensor = peers.producer.lookup, torch.ones(MIB)
    async with asyncio.timeout(20):
        for token in range(6):
            await lookup.insert([token], None, tensor, None, None)
            assert await lookup.peek([token]) == 1
            key = (await lookup.drop_select([token])).key
            assert isinstance(key, torch.Tensor) and torch.equal(key, tensor)
    assert peers.producer.is_connected


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:0", "mem://"])
def test_both_sides_can_be_aborted_after_the_end_of_their_loop(url: str) -> None:
    async def connected() -> tuple[Peer, Server]:
        server = await serve(url, lookup=buffer).__aenter__()
        peer = await connect(server.url).__aenter__()
        await peer.lookup.insert([1], None, torch.ones(MIB), None, None)
        return peer, server

    buffer = LookupBuffer(8 * MIB)
    for side in (*asyncio.run(connected()), buffer):
        side.abort()
    assert buffer.is_closed and buffer.statistics().used_bytes == 0


async def test_leaving_by_an_error_waits_for_nothing(local: LookupBuffer) -> None:
    await local.insert([1], None, torch.ones(MIB), None, None)
    with pytest.raises(LookupError):
        async with serve("mem://", lookup=local) as server:
            async with connect(server.url) as peer:
                held = peer.lookup.drop_select([1])
                await held.__aenter__()
                raise LookupError
    await until(lambda: not local.statistics().leased)


@pytest.mark.parametrize("moment", range(1, 4))
async def test_a_cancelled_leaving_closes_all_the_same(
    local: LookupBuffer, moment: int
) -> None:
    await local.insert([1], None, torch.ones(MIB), None, None)
    async with serve("tcp://127.0.0.1:0", lookup=local) as server:
        async with connect(server.url) as peer:
            await peer.lookup.drop_select([1]).__aenter__()
            leaving = asyncio.create_task(server.aclose())
            for _ in range(moment):
                await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.wait({leaving})
            await until(lambda: not peer.is_connected)
    assert not server.peers


async def test_a_server_tells_who_is_connected(peers: Peers) -> None:
    names = {peer.own_identity.id for peer in (peers.producer, peers.consumer)}
    assert {identity.id for identity in peers.server.peers} == names
    await peers.producer.aclose()
    await until(lambda: len(peers.server.peers) == 1)


async def test_a_server_tells_who_is_gone(peers: Peers) -> None:
    gone: list[str] = []
    peers.server.call_when_lost(lambda peer: gone.append(peer.id))
    await peers.producer.aclose()
    await until(lambda: gone == [peers.producer.own_identity.id])
    assert peers.consumer.own_identity.id not in gone


async def test_what_is_not_served_is_refused_and_what_is_served_is_named(
    local: LookupBuffer,
) -> None:
    async with serve("mem://", lookup=local) as server, connect(server.url) as peer:
        with pytest.raises(NotServed, match="a lookup buffer, no store: .* store="):
            await peer.store.get("name")
        assert await peer.lookup.peek([1]) == 0
    async with (
        serve("mem://", store=StoreBuffer("1MiB")) as server,
        connect(server.url) as peer,
    ):
        with pytest.raises(NotServed, match="a store, no lookup buffer: .* lookup="):
            await peer.lookup.peek([1])


@pytest.mark.parametrize("has_gpu", [False, True])
async def test_a_peer_of_a_store_alone_logs_nothing_of_what_is_not_served(
    has_gpu: bool, gpus: FakeGpus, caplog: pytest.LogCaptureFixture
) -> None:
    device = fake_device_of(gpus.process()).device if has_gpu else None
    caplog.set_level(logging.INFO, "asynckv")
    async with (
        serve("tcp://127.0.0.1:0", store=StoreBuffer("1MiB")) as server,
        connect(server.url, device=device, max_bytes="1MiB") as peer,
    ):
        await peer.store.put("name", torch.ones(1))
    of_the_server = "asynckv.links.listen"
    logged = [one for one in caplog.records if one.name != of_the_server]
    assert [one.getMessage() for one in logged] == []


async def test_a_peer_of_a_store_that_is_to_map_memory_is_refused() -> None:
    async with serve("tcp://127.0.0.1:0", store=StoreBuffer("1MiB")) as server:
        with pytest.raises(IncompatiblePeer, match="serves a store, no lookup buffer"):
            async with connect(f"{server.url}?payload=map"):
                pass


async def test_a_pipe_is_not_found_where_buffers_are_served(
    local: LookupBuffer,
) -> None:
    async with serve("mem://", lookup=local) as server, open_pipe(server.url) as pipe:
        with pytest.raises(PeerLost, match="serves a lookup buffer, no pipe"):
            await pipe.recv_tensor()


async def test_a_server_is_shown_with_what_it_serves(local: LookupBuffer) -> None:
    server = serve("mem://a", lookup=local, store=StoreBuffer("1MiB"))
    assert repr(server) == "<Server for mem://a, not entered yet>"
    async with server, connect(server.url):
        shown = "<Server of a lookup buffer and a store at mem://a, 1 peers>"
        assert repr(server) == shown


async def test_what_cannot_be_served_is_refused(local: LookupBuffer) -> None:
    with pytest.raises(ValueError, match="nothing to serve"):
        serve("mem://")
    with pytest.raises(ConfigError, match="TLS"):
        serve("mem://", lookup=local, tls=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="store is a StoreBuffer, not a LookupBuffer"):
        serve("mem://", store=local)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lookup is a LookupBuffer, not a str"):
        serve("mem://", lookup="1GiB")  # type: ignore[arg-type]
    server = serve("mem://", lookup=local)
    with pytest.raises(RuntimeError, match="no address"):
        server.url  # noqa: B018
    await server.aclose()
    server.abort()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"identity": "a\nb"}, "one line"),
        ({"role": "foo"}, "role='foo'"),
        ({"digest": "foo"}, "digest='foo'"),
        ({"lanes": 2.5}, "2.5 lanes"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused_at_once(
    local: LookupBuffer, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        serve("mem://", lookup=local, **options)
    with pytest.raises(ConfigError, match=words):
        connect("mem://", **options)


async def test_a_server_is_entered_once(peers: Peers) -> None:
    with pytest.raises(RuntimeError, match="entered before"):
        await peers.server.__aenter__()


async def test_two_fingerprints_are_refused() -> None:
    async with (
        LookupBuffer(fingerprint="a", drain_s=0) as lookup,
        StoreBuffer(fingerprint="b") as store,
    ):
        with pytest.raises(ConfigError, match="different fingerprints"):
            await serve("mem://", lookup=lookup, store=store).__aenter__()


async def test_who_comes_while_it_leaves_is_told_so(
    peers: Peers, local: LookupBuffer
) -> None:
    await local.insert([1], None, torch.ones(MIB), None, None)
    async with peers.consumer.lookup.drop_select([1]):
        leaving = await started(peers.server.aclose())
        async with connect(peers.server.url) as late:
            with pytest.raises(BufferClosed, match="leaving"):
                await late.lookup.drop_select([1])
    await leaving


@pytest.mark.parametrize("scheme", ["tcp", "unix", "mem"])
async def test_a_consumer_that_starts_anew_voids_its_old_leases_at_once(
    scheme: Scheme, local: LookupBuffer
) -> None:
    await local.insert([1], None, torch.ones(1), None, None)
    async with (
        serve(new_url(scheme), lookup=local) as server,
        connect(server.url, identity="me", reconnect_s=0) as old,
    ):
        with pytest.raises((LeaseLost, PeerLost)):
            async with old.lookup.drop_select([1]) as entry:
                assert entry.attempt == 1
                async with connect(server.url, identity="me") as new:
                    async with asyncio.timeout(HEARTBEAT_S):
                        entry = await new.lookup.drop_select([1])
                    assert entry.attempt == 2
        await until(lambda: not local.statistics().leased)
        assert local.statistics().acknowledged == 1


async def test_a_peer_that_is_displaced_by_itself_again_and_again_keeps_no_service(
    local: LookupBuffer,
) -> None:
    peer, services = name_of("consumer"), weakref.WeakSet[object]()

    def are_two_left() -> bool:  # the last one, and what it waits for before it serves
        gc.collect()
        return len(services) <= 2

    async with serve("tcp://127.0.0.1:0?payload=inline", lookup=local) as server:
        for _ in range(8):
            link = await dial(server.url, identity=peer)
            services.update(one.lookup for one in server._services)
        await until(are_two_left)
        await link.aclose()


async def test_who_is_connected_goes_on_when_nobody_else_may_connect(
    peers: Peers, local: LookupBuffer
) -> None:
    peers.server.stop_accepting()
    with pytest.raises(PeerLost):
        await connect(peers.server.url).__aenter__()
    await local.insert([1], None, None, None, None)
    assert (await peers.consumer.lookup.drop_select([1])).entry_id


async def test_before_it_is_entered_nobody_connects_anyway(local: LookupBuffer) -> None:
    server = serve("mem://", lookup=local)
    server.stop_accepting()
    async with server, connect(server.url) as peer:
        assert await peer.lookup.peek([1]) == 0


async def test_a_time_that_is_none_is_refused_and_closes_nothing(peers: Peers) -> None:
    with pytest.raises(ValueError, match="drain_s is"):
        await peers.server.aclose(drain_s=math.nan)
    assert await peers.consumer.lookup.peek([1]) == 0


async def test_deliveries_have_as_long_to_end_as_is_asked_for(
    peers: Peers, local: LookupBuffer
) -> None:
    await local.insert([1], None, torch.ones(MIB), None, None)
    with pytest.raises(LeaseLost):
        async with peers.consumer.lookup.drop_select([1]):
            async with asyncio.timeout(5):
                await peers.server.aclose(drain_s=0)
    assert local.statistics().leased == 0
