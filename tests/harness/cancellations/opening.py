"""Opening what is served and what is connected: open, or as if it had never begun."""

from __future__ import annotations

import asyncio
from typing import Final

from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import serve
from asynckv.links.link import Link
from asynckv.pipes.endpoints import PipeListener, listen_pipe, open_pipe
from asynckv.pipes.pipe import Pipe
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect
from asynckv.testing.pairs import new_url
from harness.cancellations.grounds import OVER_LINKS, Ground
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper

__all__ = (
    "OPENING",
    "a_connection",
    "a_connection_that_comes_back",
    "a_listener",
    "a_pipe",
    "a_server",
    "an_accept",
)


async def a_connection(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Dialled, used and closed."""

    async def visit() -> int:
        async with connect(ground.url, lanes=1, **ground.options) as peer:
            return await peer.lookup.peek([1])

    async def check(outcome: Outcome[int]) -> None:
        expect(outcome.cancelled or outcome.value == 0, f"peek: {outcome}")
        await ground.consumer.peek([1])
        await ground.check_quiet()

    await sweeper.sweep("a connection", visit, check)


async def a_connection_that_comes_back(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """Who waits for it may give up; it comes back all the same."""
    async with connect(ground.url, lanes=1, **ground.options) as peer:

        async def before() -> None:
            (await peer.link()).abort()
            await until(lambda: not peer.is_connected)

        async def check(outcome: Outcome[Link]) -> None:
            expect((await peer.link()).is_open, "it did not come back")
            await until(lambda: len(ground.watched.server._services) == 3)  # type: ignore[union-attr]

        await sweeper.sweep("a link that comes back", peer.link, check, before)
    await ground.check_quiet()


async def a_server(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Entered and left, with a link that it closes, again at the same place."""
    url = new_url(ground.scheme)

    async def open_and_close() -> None:
        async with serve(url, lookup=ground.local, **ground.options) as server:
            await ground.link_to(server.url)

    async def check(outcome: Outcome[None]) -> None:
        await ground.check_quiet()

    await sweeper.sweep("a server", open_and_close, check)
    await open_and_close()


async def a_pipe(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Dialled, accepted, used and closed on both sides."""
    opened = listen_pipe(new_url(ground.scheme), lanes=1, **ground.options)
    async with opened as listener:

        async def open_and_close() -> None:
            async with open_pipe(listener.url, lanes=1, **ground.options) as pipe:
                await pipe.send_tensor(None)
                async with await listener.accept() as far:
                    await far.recv_tensor()

        async def check(outcome: Outcome[None]) -> None:
            await _is_usable(listener, ground)

        await sweeper.sweep("a pipe", open_and_close, check)
    await ground.check_quiet()


async def _is_usable(listener: PipeListener, ground: Ground) -> None:
    """Whoever went away before it was accepted is passed over."""
    async with (
        open_pipe(listener.url, lanes=1, **ground.options) as pipe,
        await listener.accept() as far,
    ):
        await pipe.send_tensor(None)
        expect(await far.recv_tensor() is None, "a tensor of nobody")


async def an_accept(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Has taken nothing: the next one takes that pipe."""
    dialled: asyncio.Task[None]
    opened = listen_pipe(new_url(ground.scheme), lanes=1, **ground.options)
    async with opened as listener:

        async def dial() -> None:
            async with open_pipe(listener.url, lanes=1, **ground.options) as pipe:
                expect(await pipe.recv_tensor() is None, "a tensor of nobody")

        async def before() -> None:
            nonlocal dialled
            dialled = asyncio.create_task(dial())

        async def check(outcome: Outcome[Pipe]) -> None:
            async with outcome.value or await listener.accept() as pipe:
                await pipe.send_tensor(None)
            await dialled

        await sweeper.sweep("an accept", listener.accept, check, before)
    await ground.check_quiet()


async def a_listener(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Entered and left, with a link that it closes, again at the same place."""
    url = new_url(ground.scheme)

    async def open_and_close() -> None:
        async with listen_pipe(url, **ground.options) as listener:
            await ground.link_to(listener.url)

    async def check(outcome: Outcome[None]) -> None:
        await ground.check_quiet()

    await sweeper.sweep("a listener", open_and_close, check)
    await open_and_close()


_PEER: Final = ("connect", "Peer.__aenter__", "Peer.__aexit__", "PeerConnection.aclose")
_LISTENER: Final = (
    "listen_pipe",
    "PipeListener.__aenter__",
    "PipeListener.__aexit__",
)

OPENING: Final = tuple(
    Scenario(run, covers, OVER_LINKS, sizes=(0,), is_costly=True)
    for run, covers in (
        (a_connection, _PEER),
        (a_connection_that_comes_back, ("PeerConnection.link",)),
        (a_server, ("serve", "Server.__aenter__", "Server.__aexit__")),
        (a_pipe, ("open_pipe", "KVPipe.__aexit__")),
        (an_accept, ("PipeListener.accept", "PipeListener.accept_end")),
        (a_listener, _LISTENER),
    )
)
