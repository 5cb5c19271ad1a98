from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import Server, serve
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import (
    ConfigError,
    IncompatiblePeer,
    PeerLost,
    WrongLoop,
)
from asynckv.testing import use_across_tasks
from asynckv.testing.blocked import until
from asynckv.testing.pairs import SCHEMES, Peers, Scheme, new_url


@pytest.mark.both_loops
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_peer_tells_who_it_is_and_how_payload_moves(
    local: LookupBuffer, scheme: Scheme
) -> None:
    url = new_url(scheme)
    async with serve(url, lookup=local, identity="me", role="producer") as server:
        async with connect(server.url) as peer:
            assert (peer.identity, peer.role) == ("me", "producer")
            assert peer.transport == ("mem" if scheme == "mem" else "inline")
            assert peer.incarnation == server.identity.incarnation
            assert peer.is_connected


async def test_one_task_may_enter_what_another_leaves(local: LookupBuffer) -> None:
    async def use(server: Server) -> None:
        await use_across_tasks(connect(server.url), lambda peer: peer.lookup.peek([1]))

    await use_across_tasks(serve("tcp://127.0.0.1:0", lookup=local), use)


async def test_a_peer_that_was_not_entered_says_so() -> None:
    peer = connect("mem://nowhere")
    for name in ("identity", "transport", "role", "incarnation"):
        with pytest.raises(RuntimeError, match="async with connect"):
            getattr(peer, name)
    with pytest.raises(RuntimeError, match="async with connect"):
        await peer.lookup.drop_select([1])
    with pytest.raises(RuntimeError, match="async with connect"):
        await peer.store.get("name")


async def test_a_peer_is_shown_with_how_it_is_connected(local: LookupBuffer) -> None:
    async with serve("mem://a", lookup=local, identity="me") as server:
        peer = connect(server.url)
        assert repr(peer) == "<Peer at mem://a, not entered yet>"
        async with peer:
            assert repr(peer) == "<Peer at mem://a, connected to me by mem>"
            assert repr(peer.lookup) == f"<RemoteLookupBuffer of {peer!r}>"
            assert repr(peer.store) == f"<RemoteStoreBuffer of {peer!r}>"
        assert repr(peer) == "<Peer at mem://a, not connected>"


async def test_nobody_there_is_a_lost_peer() -> None:
    with pytest.raises(PeerLost):
        async with connect("mem://nowhere"):
            pass


async def test_another_loop_is_refused(peers: Peers) -> None:
    future: asyncio.Future[BaseException | None]
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def run() -> None:
        found: BaseException | None = None
        try:
            asyncio.run(peers.consumer.lookup.peek([1]))
        except WrongLoop as exc:
            found = exc
        loop.call_soon_threadsafe(future.set_result, found)

    threading.Thread(target=run).start()
    assert isinstance(await future, WrongLoop)


async def test_a_fingerprint_that_differs_is_named() -> None:
    async with (
        LookupBuffer(fingerprint={"model": "a"}, drain_s=0) as local,
        serve("mem://", lookup=local) as server,
    ):
        with pytest.raises(IncompatiblePeer) as caught:
            async with connect(server.url, fingerprint={"model": "b"}):
                pass
        assert caught.value.field == "model"


async def test_one_fingerprint_is_warned_of_once_a_side_where_entries_are_looked_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        LookupBuffer(drain_s=0) as local,
        serve("mem://", lookup=local) as server,
        connect(server.url, fingerprint="m") as peer,
    ):
        for _ in range(2):
            await peer.lookup.peek([1])
    said = [line for line in caplog.messages if "only one side" in line]
    assert len(said) == 2


async def test_a_store_keeps_the_values_of_each_fingerprint_and_warns_of_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with StoreBuffer() as local, serve("mem://", store=local) as server:
        async with (
            connect(server.url, fingerprint="m") as first,
            connect(server.url, fingerprint="m") as second,
        ):
            await first.store.put("a", torch.ones(1))
            assert await second.store.contains(["a"]) == (True,)
    assert not caplog.messages


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(ConfigError, match="TLS"):
        connect("mem://x", tls=object())  # type: ignore[arg-type]


async def test_a_peer_that_was_never_entered_can_be_closed() -> None:
    peer = connect("mem://nowhere")
    await peer.aclose()
    with pytest.raises(RuntimeError, match="entered before"):
        await peer.__aenter__()
    peer.lookup.abort()


async def test_leaving_ends_what_waits(peers: Peers, local: LookupBuffer) -> None:
    call = asyncio.create_task(peers.consumer.lookup.drop_select([1]))
    await until(lambda: local.statistics().waiting_selects == 1)
    await peers.consumer.aclose()
    with pytest.raises(PeerLost, match="closed on this side"):
        await call
    await until(lambda: local.statistics().waiting_selects == 0)
    with pytest.raises(RuntimeError, match="connect again"):
        await peers.consumer.__aenter__()


async def test_leaving_returns_what_is_leased(
    peers: Peers, local: LookupBuffer
) -> None:
    await local.insert([1], None, torch.ones(3), None, None)
    held = peers.consumer.lookup.drop_select([1])
    await held.__aenter__()
    await peers.consumer.aclose()
    await until(lambda: local.statistics().leased == 0)
    with pytest.raises(Exception, match="given back"):
        await held.__aexit__(None, None, None)


async def test_a_cancelled_leaving_leaves_nothing_open(local: LookupBuffer) -> None:
    async with serve("tcp://127.0.0.1:0", lookup=local) as server:
        peer = await connect(server.url).__aenter__()
        closing = asyncio.create_task(peer.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        assert not peer.is_connected
        await until(lambda: not server.peers)
