"""What is opened is open, or as if it had never begun; what ends, ends soon."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote import connection
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import AsyncKVError, BufferClosed, PeerLost
from asynckv.pipes.endpoints import listen_pipe, open_pipe
from asynckv.testing.blocked import until
from asynckv.testing.expectations import expect, expect_error, noise
from asynckv.testing.pairs import new_url
from harness.cancellations.entries import TOKENS, Entries
from harness.cancellations.grounds import Ground
from harness.cancellations.sweeper import OVER_LINKS, SMALL, Sweeper, scenario

__all__: tuple[str, ...] = ()

_ONCE: Final[dict[str, Any]] = {"kinds": OVER_LINKS, "sizes": (0,), "is_costly": True}


@scenario(
    *("connect", "Peer.__aenter__", "Peer.__aexit__", "PeerConnection.aclose"), **_ONCE
)
async def a_connection(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Dialled, used and closed."""

    async def visit() -> int:
        async with connect(ground.server.url, lanes=1, **ground.options) as peer:
            return await peer.lookup.peek([1])

    async for cancel in sweeper.sweep():
        outcome = await cancel(visit)
        expect(outcome.cancelled or outcome.value == 0, f"peek: {outcome}")
        await ground.consumer.peek([1])


@scenario("PeerConnection.link", **_ONCE)
async def a_connection_that_comes_back(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """Who waits for it may give up; it comes back all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "_LONGEST_PAUSE_S", 0.01)
        async with connect(ground.server.url, lanes=1, **ground.options) as peer:
            async for cancel in sweeper.sweep(is_open=True):
                (await peer.link()).abort()
                await until(lambda: not peer.is_connected)
                await cancel(peer.link)
                expect((await peer.link()).is_open, "it did not come back")
                await until(lambda: len(ground.server._services) == 3)


@scenario(
    *("serve", "Server.__aenter__", "Server.__aexit__"),
    *("listen_pipe", "PipeListener.__aenter__", "PipeListener.__aexit__"),
    **_ONCE,
)
async def what_listens(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Entered and left, with a link that it closes, again at the same place."""
    url, options = new_url(ground.scheme), ground.options

    async def visit(open_it: Callable[[], Any]) -> None:
        async with open_it() as opened:
            await ground.link_to(opened.url)

    ways: dict[str, Callable[[], Any]] = {
        "a server": lambda: serve(url, lookup=ground.local, **options),
        "a listener": lambda: listen_pipe(url, **options),
    }
    for way, open_it in ways.items():
        async for cancel in sweeper.sweep(way):
            await cancel(visit, open_it)
        await visit(open_it)


@scenario("open_pipe", "KVPipe.__aexit__", **_ONCE)
async def a_pipe(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Dialled, accepted, used and closed on both sides.

    Whoever went away before it was accepted is passed over.
    """
    opened = listen_pipe(new_url(ground.scheme), lanes=1, **ground.options)
    async with opened as listener:

        async def visit() -> None:
            async with open_pipe(listener.url, lanes=1, **ground.options) as pipe:
                await pipe.send_tensor(None)
                async with await listener.accept() as far:
                    expect(await far.recv_tensor() is None, "a tensor of nobody")

        async for cancel in sweeper.sweep(is_open=True):
            await cancel(visit)
            async with (
                open_pipe(listener.url, lanes=1, **ground.options) as pipe,
                await listener.accept() as far,
            ):
                await pipe.send_tensor(None)
                expect(await far.recv_tensor() is None, "a tensor of nobody")


@scenario("PipeListener.accept", "PipeListener.accept_end", **_ONCE)
async def an_accept(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Has taken nothing: the next one takes that pipe."""
    opened = listen_pipe(new_url(ground.scheme), lanes=1, **ground.options)
    async with opened as listener:

        async def dial() -> None:
            async with open_pipe(listener.url, lanes=1, **ground.options) as pipe:
                expect(await pipe.recv_tensor() is None, "a tensor of nobody")

        async for cancel in sweeper.sweep(is_open=True):
            dialled = asyncio.create_task(dial())
            outcome = await cancel(listener.accept)
            async with outcome.value or await listener.accept() as pipe:
                await pipe.send_tensor(None)
            await dialled


@scenario(
    *("PeerConnection.aclose", "PeerBuffer.aclose"),
    *("KVLookupBuffer.aclose", "KVStoreBuffer.aclose"),
    **_ONCE | {"sizes": (SMALL,)},
)
async def a_peers_end(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """What it held goes back; by its lookup's and its store's ``aclose`` too."""
    entries = Entries(ground, nbytes)

    async def hold(peer: Peer) -> None:
        async with peer.lookup.drop_select(TOKENS):
            await peer.lookup.drop_select(entry_id="never comes")

    for way in ("peer", "lookup", "store"):
        async for cancel in sweeper.sweep(way):
            await entries.bring()
            opened = connect(ground.server.url, lanes=1, **ground.options)
            peer = await opened.__aenter__()
            holding = asyncio.create_task(hold(peer))
            await until(lambda: ground.local.statistics().leased == 1)
            await sweeper.pause()
            ends: dict[str, Any] = {"lookup": peer.lookup, "store": peer.store}
            await cancel(ends.get(way, peer).aclose)
            if not cancel.has_begun:
                peer.abort()
            expect(not peer.is_connected, "it was closed, and is connected")
            await asyncio.wait({holding})
            expect(isinstance(holding.exception(), AsyncKVError), f"{holding}")
            await expect_error(PeerLost, peer.lookup.peek(TOKENS))
            await until(lambda: ground.local.statistics().leased == 0)
            entries.expect_in(True)
            await entries.clear(ground)


@scenario("Server.aclose", kinds=OVER_LINKS, is_costly=True)
async def a_servers_end(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """It waits for a delivery under way; cancelled, for nobody."""

    async def use(peer: Peer) -> None:
        async with peer.lookup.drop_select(TOKENS):
            await sweeper.pause()

    async with LookupBuffer("1MiB", drain_s=0) as own:
        async for cancel in sweeper.sweep():
            async with contextlib.AsyncExitStack() as stack:
                opened = serve(new_url(ground.scheme), lookup=own, **ground.options)
                server = await stack.enter_async_context(opened)
                dialled = connect(server.url, lanes=1, reconnect_s=0, **ground.options)
                peer = await stack.enter_async_context(dialled)
                await own.insert(TOKENS, None, noise(nbytes, 1), None, None)
                using = asyncio.create_task(use(peer))
                await until(lambda: own.statistics().leased == 1)
                outcome = await cancel(server.aclose)
                (error,) = await asyncio.gather(using, return_exceptions=True)
                expect(error is None or isinstance(error, AsyncKVError), repr(error))
                expect(error is None or outcome.cancelled, "the delivery was cut off")
                if not cancel.has_begun:
                    await server.aclose()
                again = connect(server.url, **ground.options)
                await expect_error(PeerLost, again.__aenter__())
            if own.statistics().entries:
                await own.drop_select(TOKENS)
            now = own.statistics()
            expect((now.leased, now.used_bytes) == (0, 0), f"left behind: {now}")


@scenario("KVLookupBuffer.aclose", "LookupBuffer.__aexit__", is_costly=True)
async def a_lookup_buffers_end(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """While somebody drains it and others wait: all are served, or told."""

    async def drain(own: LookupBuffer) -> None:
        await until(lambda: own.ledger.is_closing)
        await sweeper.pause()
        await own.drop_select(TOKENS)

    async def select(own: LookupBuffer, tokens: list[int]) -> None:
        await own.drop_select(tokens)

    async def leave(own: LookupBuffer) -> None:
        await own.__aexit__(None, None, None)

    for way in ("closed", "left"):
        async for cancel in sweeper.sweep(way):
            own = LookupBuffer(ground.local.statistics().max_bytes, drain_s=5)
            await own.insert(TOKENS, None, noise(nbytes, 1), None, None, entry_id="it")
            waiting = [
                asyncio.create_task(one)
                for one in (select(own, [3]), own.taken("it"), drain(own))
            ]
            await until(lambda: own.statistics().waiting_selects == 1)
            await (cancel(leave, own) if way == "left" else cancel(own.aclose))
            if not cancel.has_begun:
                own.abort()
            for told in await asyncio.gather(*waiting, return_exceptions=True):
                is_told = told is None or isinstance(told, AsyncKVError)
                expect(is_told, f"a waiter got {told!r}")
            await expect_error(BufferClosed, select(own, TOKENS))
            await expect_error(BufferClosed, own.insert(TOKENS, None, None, None, None))
            await own.aclose()
            now = own.statistics()
            left = now.waiting_selects, now.waiting_inserts, now.leased
            expect(left == (0, 0, 0), f"left behind: {now}")


@scenario("KVStoreBuffer.aclose", sizes=(SMALL,), is_costly=True)
async def a_store_buffers_end(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """A put that waits for room is told."""
    async for cancel in sweeper.sweep():
        own = StoreBuffer(2 * nbytes)
        await own.put("pinned", noise(2 * nbytes, 1))
        own.values.lookup("pinned", None)
        putting = asyncio.create_task(own.put("key", noise(nbytes, 2)))
        await until(lambda: own.statistics().waiting_puts == 1)
        await cancel(own.aclose)
        if not cancel.has_begun:
            own.abort()
        await expect_error(BufferClosed, putting)
        await expect_error(BufferClosed, own.get("key"))
        await own.aclose()
