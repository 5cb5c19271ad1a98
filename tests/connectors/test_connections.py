from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer
from asynckv.buffers.serve import Server, serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors import connections as module
from asynckv.connectors.connections import (
    PeerConnection,
    Peers,
    StoreConnection,
    identity_of,
)
from asynckv.connectors.engine import KVEngine
from asynckv.errors import ConfigError, GPUFailed, PeerLost, PeerRestarted
from asynckv.testing.blocked import until, until_blocked
from harness.fake_devices import FakeDevice

ENGINE = KVEngine(engine_id="D", block_size=16)


def peers_of(peers: object) -> Peers:
    extra = {"peers": peers}
    config = KVTransferConfig(
        kv_role="kv_both", kv_buffer_size="1MiB", kv_connector_extra_config=extra
    )
    return Peers(config, ENGINE)


def server_of(buffer: LookupBuffer, url: str = "mem://peers") -> Server:
    return serve(url, lookup=buffer, identity=identity_of("P", 0))


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    """Those of a configuration that has one."""
    yield (peers := peers_of({"P": "mem://peers"}))
    await peers.aclose()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """It says that it is P/0."""
    async with LookupBuffer() as buffer, server_of(buffer) as server:
        yield server


@pytest.mark.usefixtures("server")
async def test_a_peer_is_dialled_once_whoever_needs_it(peers: Peers) -> None:
    one, two = await asyncio.gather(peers.find("P", 0), peers.find("P", 0))
    assert one is two
    assert peers.connected == 1
    await peers.aclose()
    with pytest.raises(PeerLost, match="closed"):
        await peers.find("P", 0)


async def test_a_lost_peer_is_dialled_again_by_the_next_who_needs_it(
    peers: Peers,
) -> None:
    async with LookupBuffer() as buffer:
        async with server_of(buffer):
            first = await peers.find("P", 0)
        await until(lambda: not first.is_connected)
        with pytest.raises(PeerLost):
            await peers.find("P", 0)
        async with server_of(buffer):
            again = await peers.find("P", 0)
            assert again is not first
            with pytest.raises(PeerRestarted):
                await peers.find("P", 0, first.incarnation)
            assert peers.lost == 1
            await peers.aclose()


@pytest.mark.usefixtures("server")
async def test_a_gpu_takes_its_time_to_open_beside_the_dialling(
    peers: Peers, gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_DIAL_S", 0.0)
    peers.device = gpu.device
    assert (await peers.find("P", 0)).identity == "P/0"
    await peers.aclose()


@pytest.mark.usefixtures("server")
async def test_a_gpu_has_memory_for_one_link_to_a_peer_at_a_time(
    peers: Peers, gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_close, entered = asyncio.Event(), list[Peer]()
    aclose, aenter = Peer.aclose, Peer.__aenter__

    async def close(peer: Peer) -> None:
        await may_close.wait()
        await aclose(peer)

    async def enter(peer: Peer) -> Peer:
        entered.append(peer)
        return await aenter(peer)

    peers.device = gpu.device
    (await peers.find("P", 0)).abort()
    monkeypatch.setattr(Peer, "aclose", close)
    monkeypatch.setattr(Peer, "__aenter__", enter)
    finding = asyncio.create_task(peers.find("P", 0))
    await until_blocked(finding)
    assert peers.lost == 1 and not entered
    may_close.set()
    assert (await finding).is_connected
    await peers.aclose()


@pytest.mark.usefixtures("server")
async def test_of_urls_alone_it_is_asked_who_is_there() -> None:
    peers = peers_of(["mem://peers", "mem://nobody"])
    assert (await peers.find("P", 0)).identity == "P/0"
    with pytest.raises(PeerLost, match="none of the 2"):
        await peers.find("Q", 0)
    await peers.aclose()


@pytest.mark.usefixtures("server")
async def test_an_address_is_no_name(peers: Peers) -> None:
    with pytest.raises(PeerLost):
        await peers.find("mem://peers", 0)


async def test_it_is_said_why_nobody_serves_at_a_port_that_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_DIAL_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        peers = peers_of([url])
        with pytest.raises(PeerLost) as caught:
            await peers.find("P", 0)
        await peers.aclose()
    assert str(caught.value).startswith(f"nobody serves at {url}: no answer within 0.0")
    assert "so none of the 1 configured peers is P/0" in str(caught.value)


async def test_who_is_closed_while_it_is_dialled_reaches_nobody(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def enter(peer: Peer) -> Peer:
        await asyncio.Event().wait()
        return peer

    monkeypatch.setattr(Peer, "__aenter__", enter)
    line = peers.line("P", 0)
    dialling = asyncio.create_task(line.peer())
    await until_blocked(dialling)
    await line.aclose()
    with pytest.raises(PeerLost, match="was closed"):
        await dialling
    with pytest.raises(PeerLost, match="closed"):
        await line.peer()


async def test_nobody_else_is_asked_for_a_name_once_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered = list[Peer]()

    async def enter(peer: Peer) -> Peer:
        entered.append(peer)
        await asyncio.Event().wait()
        return peer

    monkeypatch.setattr(Peer, "__aenter__", enter)
    peers = peers_of(["mem://one", "mem://another"])
    finding = asyncio.create_task(peers.find("P", 0))
    await until_blocked(finding)
    await peers.aclose()
    await asyncio.wait({finding}, timeout=5)
    assert len(entered) == 1
    with pytest.raises(PeerLost, match="closed"):
        await finding


@pytest.mark.usefixtures("server")
async def test_who_is_connected_is_known_by_the_name_it_has_said(peers: Peers) -> None:
    peer, line = await peers.find("P", 0), peers.line("P", 0)
    assert line.is_of("P/0") and not line.is_of("P/1")
    peers.hang_up("Q", 0)
    peers.hang_up("P", 1)
    assert peer.is_connected
    peers.hang_up("P", 0)
    assert not peer.is_connected and not line.is_of("P/0")


@pytest.mark.parametrize("max_bytes", [None, 2**16])
async def test_only_a_way_from_a_gpu_may_do_without_it(
    peers: Peers, gpu: FakeDevice, max_bytes: int | None
) -> None:
    peers.device = gpu.device
    if max_bytes is not None:
        peers.push_from(gpu.device, max_bytes)
    line = peers.line("P", 0)
    assert line.does_without_gpu == (max_bytes is not None)
    assert line.max_bytes == (max_bytes or 2**20)


@pytest.mark.usefixtures("server")
async def test_a_way_may_lead_to_a_gpu_from_its_own_until_the_peer_says_no(
    peers: Peers, gpu: FakeDevice
) -> None:
    assert not peers.line("P", 0).may_lead_to_gpu("cuda:0")
    line = PeerConnection("mem://peers", peers._config, "D/0", gpu.device)
    assert line.may_lead_to_gpu("cuda:0") and not line.may_lead_to_gpu("cuda:1")
    await line.peer()
    assert not line.may_lead_to_gpu("cuda:0")
    await line.aclose()


@pytest.mark.usefixtures("server")
async def test_memory_that_its_gpu_has_not_got_is_done_without_where_that_may_be(
    peers: Peers,
    gpu: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(nbytes: int) -> None:
        raise GPUFailed("out of memory", code=2)

    monkeypatch.setattr(gpu.process.cuda, "malloc", refuse)
    config = peers._config
    line = PeerConnection("mem://peers", config, "D/0", gpu.device)
    line.max_bytes = 2 * config.max_bytes
    with pytest.raises(GPUFailed, match="out of memory"):
        await line.peer()
    assert line.device is gpu.device
    line.does_without_gpu = True
    first, second = await asyncio.gather(line.peer(), line.peer())
    assert first is second
    assert [line.device, line.max_bytes] == [None, config.max_bytes]
    assert caplog.text.count("by way of host memory") == 1
    first.abort()
    line._leave_lost()  # the next one may find memory there
    assert (line.device, line.max_bytes) == (gpu.device, 2 * config.max_bytes)
    await line.aclose()


@pytest.mark.usefixtures("server")
async def test_what_is_pushed_to_who_has_no_name_may_lead_to_any_peers_gpu(
    gpu: FakeDevice,
) -> None:
    peers = peers_of({"P": "mem://peers", "Q": "mem://others"})
    peers.push_from(gpu.device, 2**20)
    assert not peers.may_lead_to_gpu("", 0, "cuda:7")
    await peers.line("P", 0).peer()
    assert not peers.may_lead_to_gpu("P", 0, "cuda:0")
    assert peers.may_lead_to_gpu("", 0, "cuda:0")  # as the other one may
    await peers.aclose()


def config_of(**extra: object) -> KVTransferConfig:
    return KVTransferConfig(kv_role="kv_both", kv_connector_extra_config=extra)


async def test_the_configured_store_is_dialled_when_it_is_needed() -> None:
    line = StoreConnection(
        config_of(store="mem://line", fingerprint="toy"), ENGINE, None, "0"
    )
    async with StoreBuffer() as store, serve("mem://line", store=store):
        assert await (await line.store()).contains(["a"]) == (False,)
        await line.aclose()


async def test_a_store_that_is_given_is_used_and_left_open() -> None:
    async with StoreBuffer() as store:
        line = StoreConnection(config_of(), ENGINE, store, "0")
        assert await line.store() is store
        await line.aclose()
        line.abort()
        assert await store.contains([]) == ()


@pytest.mark.parametrize(
    ("extra", "lacks"),
    [({}, "store"), ({"store": "mem://line"}, "fingerprint")],
    ids=["no store", "blocks of nobody knows which model"],
)
def test_without_a_store_of_a_known_model_there_is_no_connector(
    extra: dict[str, str], lacks: str
) -> None:
    with pytest.raises(ConfigError, match=rf"extra_config\.{lacks}"):
        StoreConnection(config_of(**extra), ENGINE, None, "0")
