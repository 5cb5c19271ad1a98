from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
import torch

from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import Server, serve
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import EntryTooLarge, PeerLost
from asynckv.links.link import Link
from asynckv.links.listen import listen
from asynckv.protocol.frames import Failure
from asynckv.testing.blocked import until
from harness.link_pairs import ScriptedService, name_of

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


async def test_a_get_is_made_again_on_the_next_link(
    served: Served, cut_when: Callable[[Link, type], None]
) -> None:
    server, peer, local = served
    await local.put("key", torch.ones(MIB))
    (services,) = server._services
    cut_when(services.link, object)
    value = await peer.store.get("key")
    assert value is not None and bool(value.all()) and not peer.budget.used_bytes
    await local.delete("key")
    await until(lambda: not local.statistics().used_bytes)


async def test_a_loss_that_the_peer_tells_of_is_raised() -> None:
    lost = Failure("PeerLost", "another peer")
    service = ScriptedService(lambda stream, *_: stream.send(lost))
    listener = await listen(
        "mem://", identity=name_of("far"), service_for=lambda _: service
    )
    async with connect(listener.url) as peer:
        with pytest.raises(PeerLost, match="another"):
            await peer.store.get("key")
        assert peer.is_connected and len(service.asked) == 1
    await listener.aclose()


async def test_a_key_is_deleted_by_name_or_by_putting_none(served: Served) -> None:
    _, peer, local = served
    for key in ("a", "b"):
        await local.put(key, torch.ones(1))
    assert await peer.store.delete("a") and not await peer.store.delete("a")
    await peer.store.put("b", None)
    assert await peer.store.contains(["a", "b"]) == (False, False)


async def test_statistics_tell_what_is_under_way(served: Served) -> None:
    _, peer, _ = served
    now = peer.store.statistics()
    assert (now.getting, now.waiting_puts, now.is_connected) == (0, 0, True)
    with pytest.raises(TypeError, match="not one key"):
        await peer.store.contains("key")
    await peer.store.aclose()
    assert not peer.store.statistics().is_connected
    peer.store.abort()


async def test_statistics_count_what_was_found_and_what_was_not(
    served: Served,
) -> None:
    _, peer, _ = served
    await peer.store.put("here", torch.ones(1))
    for key in ("here", "there", "here"):
        await peer.store.get(key)
    now = peer.store.statistics()
    assert (now.hits, now.misses) == (2, 1)


async def test_what_is_no_tensor_is_refused_alike_here_and_at_a_peer(
    served: Served,
) -> None:
    _, peer, local = served
    for store in (local, peer.store):
        with pytest.raises(TypeError, match="a value is a tensor, not list"):
            await store.put("key", [1.0])  # type: ignore[arg-type]
