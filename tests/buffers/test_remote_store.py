from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.buffers.remote import Peer, connect
from asynckv.buffers.serve import Server, serve
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import EntryTooLarge, RemoteProtocolError
from asynckv.links.listen import listen
from asynckv.links.requests import LinkStream
from asynckv.protocol.frames import Accepted, Grant, OpeningFrame, Put, Result
from asynckv.testing.blocked import until
from asynckv.testing.link_pairs import ScriptedService, name_of

MIB = 2**20


@pytest.fixture
async def served() -> AsyncIterator[tuple[Server, Peer, StoreBuffer]]:
    async with (
        StoreBuffer("16MiB") as local,
        serve("tcp://127.0.0.1:0", store=local) as server,
        connect(server.url, max_bytes="4MiB", reconnect_s=5) as peer,
    ):
        yield server, peer, local


Served = tuple[Server, Peer, StoreBuffer]


async def test_any_number_of_keys_is_asked_for(served: Served) -> None:
    _, peer, _ = served
    await peer.store.put("7", torch.ones(3))
    found = await peer.store.contains([str(n) for n in range(9000)])
    assert len(found) == 9000 and [i for i, is_in in enumerate(found) if is_in] == [7]
    assert await peer.store.contains([]) == ()
    assert not any(await peer.store.contains(["\u20ac" * 512] * 100))


async def test_a_value_beyond_the_receive_bound_needs_into(served: Served) -> None:
    _, peer, _ = served
    await peer.store.put("key", torch.ones(2 * MIB))
    with pytest.raises(EntryTooLarge):
        await peer.store.get("key")
    into = torch.zeros(2 * MIB)
    assert await peer.store.get("key", into) is into and bool(into.all())
    assert peer.budget.used_bytes == 0


async def test_without_digests_on_one_link_others_still_verify(
    served: Served,
) -> None:
    server, peer, _ = served
    async with connect(server.url, digest="off") as careless:
        await careless.store.put("key", torch.ones(MIB))
        assert await careless.store.get("key") is not None
    value = await peer.store.get("key")
    assert value is not None and bool(value.all())


@pytest.mark.parametrize("nbytes", [10, MIB])
async def test_a_cut_link_is_made_again_and_the_put_too(
    served: Served, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, peer, local = served
    (services,) = server._services
    link = services.link
    monkeypatch.setattr(link, "send_on", lambda *_: link.abort())
    await peer.store.put("key", torch.ones(nbytes))
    value = await local.get("key")
    assert value is not None and value.nbytes == 4 * nbytes


async def test_a_grant_that_crosses_the_cancellation_sends_nothing() -> None:
    service = ScriptedService(lambda *_: None)
    listener = await listen(
        "mem://", identity=name_of("far"), service_for=lambda _: service
    )
    async with connect(listener.url) as peer:
        put = asyncio.create_task(peer.store.put("key", torch.ones(MIB)))
        await until(lambda: bool(service.asked))
        stream, frame, _ = service.asked[0]
        assert isinstance(frame, Put)
        target, landed = memoryview(bytearray(4 * MIB)), []
        stream.link.payload.receive(
            frame.transfer, 0, target, lambda *end: landed.append(end[1])
        )
        stream.send(Grant(frame.transfer))
        put.cancel()
        await asyncio.wait({put})
        for _ in range(20):
            await asyncio.sleep(0)
    await listener.aclose()
    assert not any(target[:100]) and put.cancelled()


@pytest.mark.parametrize("verb", ["get", "put"])
async def test_an_answer_that_makes_no_sense_is_raised(verb: str) -> None:
    def answer(stream: LinkStream, frame: OpeningFrame, body: bytes) -> None:
        stream.send(Result(1) if verb == "put" else Accepted())

    service = ScriptedService(answer)
    listener = await listen(
        "mem://", identity=name_of("far"), service_for=lambda _: service
    )
    async with connect(listener.url, reconnect_s=0) as peer:
        arguments = [torch.ones(3)] if verb == "put" else []
        with pytest.raises(RemoteProtocolError, match="belongs here"):
            await getattr(peer.store, verb)("key", *arguments)
    await listener.aclose()


async def test_statistics_tell_what_is_under_way(served: Served) -> None:
    _, peer, _ = served
    now = peer.store.statistics()
    assert (now.getting, now.putting, now.is_connected) == (0, 0, True)
    with pytest.raises(TypeError, match="not one key"):
        await peer.store.contains("key")
    await peer.store.aclose()
    assert not peer.store.statistics().is_connected
    peer.store.abort()
