"""Closing: closed in bounded time, whenever it is cancelled, and everybody told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final

from asynckv.abc import KVEntry
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import Server, serve
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import (
    AsyncKVError,
    BufferClosed,
    PeerLost,
)
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect, expect_error, noise
from asynckv.testing.pairs import new_url
from harness.cancellations.entries import LARGE, SMALL, TOKENS, Entries
from harness.cancellations.grounds import GROUNDS, OVER_LINKS, Ground
from harness.cancellations.partners import Closing
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper

__all__ = (
    "LEAVING",
    "a_lookup_buffers_end",
    "a_peers_end",
    "a_servers_end",
    "a_store_buffers_end",
)


async def a_peers_end(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """What it held goes back; by its lookup's and its store's ``aclose`` too."""
    entries = Entries(ground, nbytes)
    closing = Closing()
    peer: Peer
    holding: asyncio.Task[Any]

    async def before() -> None:
        nonlocal peer, holding
        await entries.bring()
        peer = await connect(ground.url, lanes=1, **ground.options).__aenter__()
        holding = asyncio.create_task(_hold(peer))
        await until(lambda: ground.local.statistics().leased == 1)
        await sweeper.pause()

    async def check(outcome: Outcome[None]) -> None:
        if not closing.has_begun:
            peer.abort()
        expect(not peer.is_connected, "it was closed, and is connected")
        await asyncio.wait({holding})
        expect(isinstance(holding.exception(), AsyncKVError), f"{holding}")
        await expect_error(PeerLost, peer.lookup.peek(TOKENS))
        await until(lambda: ground.local.statistics().leased == 0)
        entries.expect_in(True)
        await entries.clear(ground.consumer)
        await ground.check_quiet()

    def run(close: Callable[[], Awaitable[None]]) -> Coroutine[Any, Any, None]:
        nonlocal closing
        closing = Closing()
        return closing.run(close)

    for name, close in (
        ("a peer's end", lambda: peer.aclose()),
        ("a remote lookup's end", lambda: peer.lookup.aclose()),
        ("a remote store's end", lambda: peer.store.aclose()),
    ):
        await sweeper.sweep(name, partial(run, close), check, before)


async def _hold(peer: Peer) -> None:
    async with peer.lookup.drop_select(TOKENS):
        await peer.lookup.drop_select(entry_id="never comes")


async def a_servers_end(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """It waits for a delivery under way; cancelled, for nobody."""
    stack = contextlib.AsyncExitStack()
    own = LookupBuffer("1MiB", drain_s=0)
    closing: Closing
    server: Server
    using: asyncio.Task[None]

    async def before() -> None:
        nonlocal server, using, closing
        closing = Closing()
        server = serve(new_url(ground.scheme), lookup=own, **ground.options)
        await stack.enter_async_context(server)
        peer = connect(server.url, lanes=1, reconnect_s=0, **ground.options)
        await stack.enter_async_context(peer)
        await own.insert(TOKENS, None, noise(nbytes, 1), None, None)
        using = asyncio.create_task(use(peer))
        await until(lambda: own.statistics().leased == 1)

    async def use(peer: Peer) -> None:
        async with peer.lookup.drop_select(TOKENS):
            await sweeper.pause()

    async def check(outcome: Outcome[None]) -> None:
        (error,) = await asyncio.gather(using, return_exceptions=True)
        expect(error is None or isinstance(error, AsyncKVError), repr(error))
        expect(error is None or outcome.cancelled, "the delivery was cut off")
        if not closing.has_begun:
            await server.aclose()
        await _is_refused(connect(server.url, **ground.options))
        await stack.aclose()
        if own.statistics().entries:
            await own.drop_select(TOKENS)
        now = own.statistics()
        expect((now.leased, now.used_bytes) == (0, 0), f"left behind: {now}")
        await ground.check_quiet()

    async with own, stack:
        call = "a server's end"
        await sweeper.sweep(call, lambda: closing.run(server.aclose), check, before)


async def _is_refused(peer: Peer) -> None:
    await expect_error(PeerLost, peer.__aenter__())


async def a_lookup_buffers_end(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """While somebody drains it and others wait: all are served, or told."""
    own: LookupBuffer
    closing: Closing
    waiting: list[asyncio.Task[Any]]

    async def before() -> None:
        nonlocal own, waiting, closing
        closing = Closing()
        own = LookupBuffer(ground.local.statistics().max_bytes, drain_s=5)
        await own.insert(TOKENS, None, noise(nbytes, 1), None, None, entry_id="it")
        waiting = [
            asyncio.create_task(_wait(own.drop_select([3]))),
            asyncio.create_task(own.taken("it")),
            asyncio.create_task(drain()),
        ]
        await until(lambda: own.statistics().waiting_selects == 1)

    async def drain() -> None:
        await until(lambda: own.ledger.is_closing)
        await sweeper.pause()
        await own.drop_select(TOKENS)

    async def check(outcome: Outcome[None]) -> None:
        if not closing.has_begun:
            own.abort()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            told = isinstance(result, AsyncKVError)
            expect(told or result is None, f"a waiter got {result!r}")
        await expect_error(BufferClosed, _wait(own.drop_select(TOKENS)))
        await expect_error(BufferClosed, own.insert(TOKENS, None, None, None, None))
        await own.aclose()
        now = own.statistics()
        left = now.waiting_selects, now.waiting_inserts, now.leased
        expect(left == (0, 0, 0), f"left behind: {now}")
        await ground.check_quiet()

    async def leave() -> None:
        await own.__aexit__(None, None, None)

    call = "a lookup's end"
    await sweeper.sweep(call, lambda: closing.run(own.aclose), check, before)
    await sweeper.sweep("leaving a lookup", lambda: closing.run(leave), check, before)


async def _wait(select: Awaitable[KVEntry]) -> None:
    await select


async def a_store_buffers_end(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """A put that waits for room is told."""
    own: StoreBuffer
    closing: Closing
    putting: asyncio.Task[None]

    async def before() -> None:
        nonlocal own, putting, closing
        closing = Closing()
        own = StoreBuffer(2 * nbytes)
        await own.put("pinned", noise(2 * nbytes, 1))
        own.values.lookup("pinned", None)
        putting = asyncio.create_task(own.put("key", noise(nbytes, 2)))
        await until(lambda: own.statistics().waiting_puts == 1)

    async def check(outcome: Outcome[None]) -> None:
        if not closing.has_begun:
            own.abort()
        await expect_error(BufferClosed, putting)
        await expect_error(BufferClosed, own.get("key"))
        await own.aclose()
        await ground.check_quiet()

    call = "a store's end"
    await sweeper.sweep(call, lambda: closing.run(own.aclose), check, before)


_OF_A_PEER: Final = (
    "PeerConnection.aclose",
    "KVLookupBuffer.aclose",
    "KVStoreBuffer.aclose",
)
_OF_A_LOOKUP: Final = ("KVLookupBuffer.aclose", "LookupBuffer.__aexit__")

LEAVING: Final = tuple(
    Scenario(run, covers, kinds, sizes, is_costly=True)
    for run, covers, kinds, sizes in (
        (a_peers_end, _OF_A_PEER, OVER_LINKS, (SMALL,)),
        (a_servers_end, ("Server.aclose",), OVER_LINKS, (SMALL, LARGE)),
        (a_lookup_buffers_end, _OF_A_LOOKUP, GROUNDS, (SMALL, LARGE)),
        (a_store_buffers_end, ("KVStoreBuffer.aclose",), GROUNDS, (SMALL,)),
    )
)
