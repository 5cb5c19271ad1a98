from __future__ import annotations

import asyncio

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import Server, serve
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.peers import Peers, identity_of
from asynckv.errors import PeerLost, PeerRestarted
from asynckv.testing.blocked import until

ENGINE = KVEngine(engine_id="D", block_size=16)


def peers_of(peers: object) -> Peers:
    extra = {"peers": peers}
    config = KVTransferConfig(kv_role="kv_both", kv_connector_extra_config=extra)
    return Peers(config, ENGINE)


def server_of(buffer: LookupBuffer, url: str = "mem://peers") -> Server:
    return serve(url, lookup=buffer, identity=identity_of("P", 0))


async def test_a_peer_is_dialled_once_whoever_needs_it() -> None:
    peers = peers_of({"P": "mem://peers"})
    async with LookupBuffer() as buffer, server_of(buffer):
        one, two = await asyncio.gather(peers.find("P", 0), peers.find("P", 0))
        assert one is two
        assert peers.connected == 1
        await peers.aclose()
        with pytest.raises(PeerLost, match="closed"):
            await peers.find("P", 0)


async def test_a_lost_peer_is_dialled_again_by_the_next_who_needs_it() -> None:
    peers = peers_of({"P": "mem://peers"})
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


async def test_of_urls_alone_it_is_asked_who_is_there() -> None:
    peers = peers_of(["mem://peers", "mem://nobody"])
    async with LookupBuffer() as buffer, server_of(buffer):
        assert (await peers.find("P", 0)).identity == "P/0"
        with pytest.raises(PeerLost, match="none of the 2"):
            await peers.find("Q", 0)
        await peers.aclose()


async def test_an_address_is_no_name() -> None:
    peers = peers_of({"P": "mem://peers"})
    async with LookupBuffer() as buffer, server_of(buffer):
        with pytest.raises(PeerLost):
            await peers.find("mem://peers", 0)
    peers.abort()
