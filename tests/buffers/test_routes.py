"""Every verb by every route: the same bytes, once; and a route that is lost midway.

What holds of one route alone is tested beside it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, TypeAlias

import pytest
import torch

from asynckv.abc import KVEntry
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import PeerLost
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.expectations import is_same, only
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.types import TensorSpec
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import open_gpu_pair
from harness.nccl_buffer_pairs import open_nccl_buffers

LARGE, SMALL = TensorSpec((MIB,), "uint8"), TensorSpec((8,), "uint8")
LAYERS: Final[Mapping[str, TensorSpec]] = {"key": LARGE, "hidden": SMALL}
CONTENT: Final[Mapping[str, torch.Tensor]] = {"key": noise(MIB), "hidden": noise(8)}


@dataclasses.dataclass(frozen=True)
class Ends:
    """A served lookup buffer, a peer of it, and where that has its tensors."""

    buffer: LookupBuffer
    peer: Peer
    at_peer: Callable[[torch.Tensor], torch.Tensor] = torch.clone


@asynccontextmanager
async def by_host(url: str, end: str) -> AsyncIterator[Ends]:
    async with (
        LookupBuffer("16MiB", drain_s=0) as buffer,
        serve(url, lookup=buffer) as server,
        connect(server.url + end, max_bytes="16MiB") as peer,
    ):
        yield Ends(buffer, peer)


@asynccontextmanager
async def by_gpus(gpus: FakeGpus, *, theirs: int) -> AsyncIterator[Ends]:
    if theirs and not gpus.has_peer_access:
        async with open_nccl_buffers(gpus) as pair:
            await pair.opened()
            yield Ends(pair.buffer, pair.peer, pair.theirs.tensor)
    else:
        async with open_gpu_pair(gpus, theirs=theirs) as near:
            yield Ends(near.buffer, near.peer, near.theirs.tensor)


@pytest.fixture(params=["mem", "link", "map", "cuda_ipc", "peer access", "nccl"])
async def ends(
    request: pytest.FixtureRequest, two_gpus: FakeGpus
) -> AsyncIterator[Ends]:
    """Both, connected by one route."""
    route: str = request.param
    if route == "map" and not has_fd_sockets():
        pytest.skip("nothing can be mapped here")
    opened: Callable[[], AbstractAsyncContextManager[Ends]] = {
        "mem": lambda: by_host("mem://", ""),
        "link": lambda: by_host("tcp://127.0.0.1:0", "?payload=inline"),
        "map": lambda: by_host("tcp://127.0.0.1:0", ""),
        "cuda_ipc": lambda: by_gpus(two_gpus, theirs=0),
        "peer access": lambda: by_gpus(two_gpus, theirs=1),
        "nccl": lambda: by_gpus(two_gpus, theirs=1),
    }[route]
    two_gpus.has_peer_access = route == "peer access"
    async with opened() as ends:
        yield ends
        names = {"link": "inline", "peer access": "cuda_ipc"}
        assert ends.peer.transport == names.get(route, route)


async def fill(buffer: LookupBuffer) -> None:
    """Insert in the buffer's own process."""
    await buffer.insert([1], None, CONTENT["key"], None, CONTENT["hidden"])


def check(entry: KVEntry) -> None:
    assert is_same(only(entry.key), CONTENT["key"])
    assert is_same(entry.hidden, CONTENT["hidden"])


async def taken_from(buffer: LookupBuffer) -> None:
    """What was put is there, once."""
    check(await buffer.drop_select([1]))
    await until(lambda: not buffer.statistics().entries)


async def insert(ends: Ends) -> None:
    key, hidden = (ends.at_peer(CONTENT[name]) for name in LAYERS)
    await ends.peer.lookup.insert([1], None, key, None, hidden)
    await taken_from(ends.buffer)


async def open_insert(ends: Ends) -> None:
    async with ends.peer.lookup.open_insert([1], None, LAYERS) as writer:
        for name in LAYERS:
            await writer.put(name, ends.at_peer(CONTENT[name]))
    await taken_from(ends.buffer)


async def drop_select(ends: Ends) -> None:
    await fill(ends.buffer)
    check(await ends.peer.lookup.drop_select([1]))


async def drop_select_into(ends: Ends) -> None:
    await fill(ends.buffer)
    into = {n: ends.at_peer(torch.zeros_like(one)) for n, one in CONTENT.items()}
    entry = await ends.peer.lookup.drop_select([1], into=into)
    assert entry.key is into["key"] and entry.hidden is into["hidden"]
    check(entry)


async def borrow(ends: Ends) -> None:
    await fill(ends.buffer)
    async with ends.peer.lookup.drop_select([1]) as entry:
        check(entry)
        assert ends.buffer.statistics().leased == 1
        del entry


async def stream(ends: Ends) -> None:
    """Layers are read while they are written."""
    async with (
        ends.buffer.open_insert([1], None, LAYERS) as writer,
        ends.peer.lookup.open_drop_select([1]) as stream,
    ):
        for name, tensor in CONTENT.items():
            await writer.put(name, tensor)
            assert is_same(await stream.wait_for(name), tensor)


Verb: TypeAlias = Callable[[Ends], Coroutine[None, None, None]]
PUTS: Final[tuple[Verb, ...]] = (insert, open_insert)
GETS: Final[tuple[Verb, ...]] = (drop_select, drop_select_into, borrow, stream)


@pytest.mark.parametrize("verb", [*PUTS, *GETS])
async def test_every_verb_moves_the_same_bytes_by_every_route(
    ends: Ends, verb: Verb
) -> None:
    for _ in range(2):
        await verb(ends)
        await until(lambda: not ends.buffer.statistics().entries)
    await until(lambda: not ends.buffer.statistics().used_bytes)
    assert not ends.peer.lookup.statistics().used_bytes


@pytest.mark.parametrize("nbytes", [0, 8, 16_384, 16_385, 65_537, 4 * MIB + 1])
@pytest.mark.parametrize("end", ["", "?payload=inline"])
async def test_values_come_back_as_they_were_put(nbytes: int, end: str) -> None:
    async with (
        StoreBuffer("16MiB") as store,
        serve("tcp://127.0.0.1:0", store=store) as server,
        connect(server.url + end) as peer,
    ):
        await peer.store.put("a", noise(nbytes))
        assert is_same(await peer.store.get("a"), noise(nbytes))
        into = torch.zeros(nbytes, dtype=torch.uint8)
        assert await peer.store.get("a", into=into) is into
        assert is_same(into, noise(nbytes))


# A route that is lost midway: the verb goes on by the next one.


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("verb", [*PUTS, drop_select, drop_select_into, borrow])
async def test_a_verb_goes_on_when_its_route_is_lost(
    two_gpus: FakeGpus, verb: Verb, *, near: bool
) -> None:
    async with open_nccl_buffers(two_gpus) as pair:
        await pair.opened()
        sender = pair.theirs if verb in PUTS else pair.ours
        sender.process.nccl.is_silent = True
        ends = Ends(pair.buffer, pair.peer, pair.theirs.tensor)
        moving = asyncio.create_task(verb(ends))
        receiver = pair.way if verb in PUTS else pair.near_way
        await until(lambda: receiver.transport.receiver.is_busy)
        await until_blocked(moving)
        (pair.near_way if near else pair.way)._stalled(PeerLost("nothing came"))
        await moving
        assert pair.peer.transport == "inline"
        await until(lambda: not pair.buffer.statistics().used_bytes)


async def test_who_loses_its_route_keeps_its_place_in_line(two_gpus: FakeGpus) -> None:
    async with open_nccl_buffers(two_gpus) as pair:
        await pair.opened()
        pair.ours.process.nccl.is_silent = True
        first = asyncio.create_task(pair.peer.lookup.drop_select([1]))
        await until(lambda: pair.buffer.statistics().waiting_selects == 1)
        second = asyncio.create_task(pair.buffer.drop_select([1]))
        await until(lambda: pair.buffer.statistics().waiting_selects == 2)
        await fill(pair.buffer)
        await until(lambda: pair.near_way.transport.receiver.is_busy)
        pair.near_way._stalled(PeerLost("nothing came"))
        entry = await first
        assert entry.attempt == 1
        check(entry)
        assert not second.done()
        await fill(pair.buffer)
        check(await second)
