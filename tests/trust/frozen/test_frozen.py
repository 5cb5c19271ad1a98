"""Peers that stand still, wherever they are, and those who go on without them.

Their kernels acknowledge for them: only silence tells. All cases of a scheme are
played at once, beside one process that is frozen for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import pytest
import torch

import asynckv
from asynckv.links.dial import dial
from asynckv.links.options import make_keyring, new_identity
from asynckv.security.tls import TLS
from asynckv.tensors.views import spec_of
from asynckv.testing.blocked import until
from asynckv.testing.pairs import Scheme

pytestmark = [
    pytest.mark.trust,
    pytest.mark.multiprocess,
    pytest.mark.timeout(180),
]

SCHEMES: Final[tuple[Scheme, ...]] = ("tcp", "unix", "tls")
PATIENCE_S: Final = 10.0
LONG_S: Final = 1.5
SHORT_S: Final = 0.2
ONES: Final = torch.ones(3)
IT_LEARNT: Final = ("LeaseLost", "PeerLost")
PIPE_LOST: Final = ("PeerLost", "PipeBroken")
HALF: Final = torch.zeros(100_000)

Stage = Any
Served = tuple[asynckv.LookupBuffer, Any]


@contextlib.asynccontextmanager
async def served(stage: Stage, max_bytes: str = "4MiB") -> AsyncIterator[Served]:
    async with (
        asynckv.LookupBuffer(max_bytes, drain_s=0) as lookup,
        asynckv.serve(stage.new_url(), lookup=lookup, **stage.options) as server,
    ):
        yield lookup, server


@contextlib.asynccontextmanager
async def connected(stage: Stage, reconnect_s: float = 0) -> AsyncIterator[Any]:
    """Connect to a server that will stand still."""
    url = await stage.peer("server", stage.new_url())
    async with asynckv.connect(url, reconnect_s=reconnect_s, **stage.options) as peer:
        yield peer


async def insert(lookup: Any, key: int = 1, value: torch.Tensor = ONES) -> None:
    await lookup.insert([key], None, value, None, None)


async def take(lookup: Any, attempt: int, value: torch.Tensor = ONES) -> None:
    """What a frozen peer had is another's, whole; then nothing is left of it."""
    entry = await lookup.drop_select([1])
    assert entry.attempt == attempt
    assert torch.equal(entry.key, value)
    await until(lambda: not lookup.statistics().leased)
    assert lookup.statistics().used_bytes == 0


# A consumer stands still.


async def it_holds_an_entry(stage: Stage) -> None:
    async with served(stage) as (lookup, server):
        await insert(lookup)
        await stage.peer("holder", server.url)
        await stage.freeze()
        await take(lookup, attempt=2)
        assert await stage.thaw() == "LeaseLost"
        assert lookup.statistics().acknowledged == 1


async def it_waits_and_is_offered_an_entry(stage: Stage) -> None:
    async with served(stage) as (lookup, server):
        await stage.peer("waiter", server.url)
        await stage.freeze()
        await insert(lookup, value=HALF)
        await take(lookup, attempt=2, value=HALF)
        assert await stage.thaw() == "PeerLost"
        assert lookup.statistics().acknowledged == 1


async def it_has_read_half_of_a_stream(stage: Stage) -> None:
    specs = {"a.key": spec_of(HALF), "b.key": spec_of(HALF)}
    async with served(stage) as (lookup, server):
        async with lookup.open_insert([1], None, specs) as writing:
            await writing.put("a.key", HALF)
            await stage.peer("reader", server.url)
            await stage.freeze()
            await writing.put("b.key", HALF)
        entry = await lookup.drop_select([1])
        assert entry.attempt == 2
        assert lookup.statistics().used_bytes == 0
        assert await stage.thaw() in IT_LEARNT


async def it_holds_an_entry_of_a_server_that_leaves(stage: Stage) -> None:
    async with served(stage) as (lookup, server):
        await insert(lookup)
        await stage.peer("holder", server.url)
        await stage.freeze()
        await server.aclose()
        await take(lookup, attempt=2)
        assert await stage.thaw() in IT_LEARNT


async def it_has_not_greeted(stage: Stage) -> None:
    async with served(stage) as (_, server):
        await stage.peer("stranger", server.url)
        await stage.freeze()
        async with asynckv.connect(server.url, **stage.options) as peer:
            await insert(peer.lookup)
            assert (await peer.lookup.drop_select([1])).nbytes == 20
        await server.aclose()
        assert await stage.thaw() == "done"


# A producer stands still.


async def it_has_written_half_of_an_entry(stage: Stage) -> None:
    async with served(stage) as (lookup, server):
        await stage.peer("writer", server.url)
        await stage.freeze()
        waiting = asyncio.create_task(lookup.drop_select([1]))
        await until(lambda: not lookup.statistics().entries, timeout_s=PATIENCE_S)
        assert lookup.statistics().used_bytes == 0
        await insert(lookup)
        assert (await waiting).nbytes == 20
        assert await stage.thaw() == "PeerLost"


async def it_waits_for_room(stage: Stage) -> None:
    async with served(stage, "1MiB") as (lookup, server):
        await insert(lookup, value=torch.zeros(200_000))
        used_bytes = lookup.statistics().used_bytes
        await stage.peer("inserter", server.url)
        assert lookup.statistics().waiting_inserts == 1
        await stage.freeze()
        await until(lambda: not lookup.statistics().waiting_inserts)
        assert lookup.statistics().used_bytes == used_bytes
        await lookup.drop_select([1])
        assert lookup.statistics().used_bytes == 0
        assert await stage.thaw() == "PeerLost"
        assert lookup.statistics().inserted == 1


# A server stands still.


async def it_is_asked_for_everything(stage: Stage) -> None:
    async with connected(stage) as peer:
        await stage.freeze()
        calls: list[Awaitable[Any]] = [
            insert(peer.lookup),
            insert(peer.lookup, value=torch.zeros(500_000)),
            peer.lookup.drop_select([7]),
            peer.lookup.peek([1]),
            peer.store.put("other", HALF),
            peer.store.get("name"),
        ]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(error) for error in found} == {asynckv.PeerLost}
        await stage.thaw()


async def it_leased_an_entry_that_is_used(stage: Stage) -> None:
    async with connected(stage) as peer:
        with pytest.raises((asynckv.PeerLost, asynckv.LeaseLost)):
            async with peer.lookup.drop_select([1]) as entry:
                assert torch.equal(entry.key, ONES)
                await stage.freeze()
        await stage.thaw()


async def it_is_left(stage: Stage) -> None:
    async with connected(stage) as peer:
        await stage.freeze()
        await peer.aclose()
        await stage.thaw()


async def it_is_dialled(stage: Stage) -> None:
    url = await stage.peer("server", stage.new_url())
    keyring = make_keyring(None, stage.options.get("tls"), False)
    await stage.freeze()
    with pytest.raises(asynckv.PeerLost):
        await dial(url, identity=new_identity(), keyring=keyring, timeout_s=0.5)
    await stage.thaw()


async def it_is_found_again(stage: Stage) -> None:
    async with connected(stage, reconnect_s=20) as peer:
        await stage.freeze()
        waiting = asyncio.create_task(peer.lookup.drop_select([1]))
        await until(lambda: not peer.is_connected, timeout_s=PATIENCE_S)
        await stage.thaw()
        assert torch.equal((await waiting).key, ONES)


# The other end of a pipe stands still.


async def it_sends(stage: Stage) -> None:
    async with asynckv.listen_pipe(stage.new_url(), **stage.options) as listener:
        playing = asyncio.create_task(stage.peer("sender", listener.url))
        pipe = await listener.accept()
        assert await pipe.recv_tensor() == torch.zeros(1)
        await playing
        await stage.freeze()
        with pytest.raises(asynckv.PeerLost):
            await pipe.recv_tensor()
        await pipe.aclose()
        assert await stage.thaw() in PIPE_LOST


async def it_receives(stage: Stage) -> None:
    async with asynckv.listen_pipe(
        stage.new_url(), max_bytes="1MiB", **stage.options
    ) as listener:
        playing = asyncio.create_task(stage.peer("receiver", listener.url))
        pipe = await listener.accept()
        await pipe.send_tensor(ONES)
        await playing
        await stage.freeze()
        with pytest.raises(asynckv.PeerLost):
            while True:
                await pipe.send_tensor(HALF)
        pipe.abort()
        assert await stage.thaw() in PIPE_LOST


# It goes on before anybody has missed it.


async def it_holds_an_entry_for_a_moment(stage: Stage) -> None:
    async with served(stage) as (lookup, server):
        await insert(lookup)
        await stage.peer("holder", server.url)
        await stage.freeze()
        assert await stage.thaw() == "done"
        assert lookup.statistics().acknowledged == 1
        assert lookup.statistics().delivered == 1


async def it_is_asked_and_soon_answers(stage: Stage) -> None:
    async with connected(stage) as peer:
        await stage.freeze()
        asking = asyncio.create_task(peer.lookup.drop_select([1]))
        await stage.thaw()
        assert torch.equal((await asking).key, ONES)


async def it_soon_sends_on(stage: Stage) -> None:
    async with asynckv.listen_pipe(stage.new_url(), **stage.options) as listener:
        playing = asyncio.create_task(stage.peer("sender", listener.url))
        pipe = await listener.accept()
        await playing
        await stage.freeze()
        assert await stage.thaw() == "done"
        for value in (0, 1):
            assert await pipe.recv_tensor() == torch.full((1,), value)
        await pipe.aclose()


LONG: Final = (
    it_holds_an_entry,
    it_waits_and_is_offered_an_entry,
    it_has_read_half_of_a_stream,
    it_holds_an_entry_of_a_server_that_leaves,
    it_has_not_greeted,
    it_has_written_half_of_an_entry,
    it_waits_for_room,
    it_is_asked_for_everything,
    it_leased_an_entry_that_is_used,
    it_is_left,
    it_is_dialled,
    it_is_found_again,
    it_sends,
    it_receives,
)
SHORT: Final = (
    it_holds_an_entry_for_a_moment,
    it_is_asked_and_soon_answers,
    it_soon_sends_on,
)


async def test_who_stands_still_costs_the_others_nothing(
    open_crowd: Callable[..., Any],
    scale: Any,
    figures: Callable[[str], None],
    tls: TLS,
) -> None:
    played, longest_s = 0, 0.0
    while played < scale.frozen_cases:
        for scheme in SCHEMES:
            options = {"tls": tls} if scheme == "tls" else {}
            async with open_crowd(scheme, options) as crowd:
                await crowd.play(LONG, LONG_S)
                await crowd.play(SHORT, SHORT_S)
            longest_s = max(longest_s, crowd.longest_s)
            played += len(LONG) + len(SHORT)
    figures(f"{played} cases over {', '.join(SCHEMES)}, {longest_s:.1f} s at most")
