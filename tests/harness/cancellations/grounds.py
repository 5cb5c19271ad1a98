"""Where calls are cancelled, opened once for many; and whether they leave it quiet."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final

import torch

from asynckv.abc import KVLookupBuffer, KVStoreBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer
from asynckv.buffers.serve import Server
from asynckv.buffers.store import StoreBuffer
from asynckv.links.dial import dial
from asynckv.links.link import Link
from asynckv.links.options import make_keyring, new_identity
from asynckv.pipes.pipe import Pipe
from asynckv.testing.blocked import until
from asynckv.testing.pairs import Scheme, open_peers, open_pipe_pair
from harness.cancellations.sweeper import Kind

__all__ = (
    "BUFFER_BYTES",
    "PIPE_BYTES",
    "Ground",
    "Watched",
    "everything_is_quiet",
    "one_thread_of_torch",
    "open_ground",
    "tasks_now",
)

BUFFER_BYTES: Final = 512 * 1024
PIPE_BYTES: Final = 256 * 1024
_TIMEOUT_S = 20.0


def tasks_now() -> frozenset[asyncio.Task[Any]]:
    """Return every task of the running loop but the current one."""
    return frozenset(asyncio.all_tasks() - {asyncio.current_task()})


@dataclasses.dataclass(frozen=True)
class Watched:
    """What calls may leave something in. ``tasks`` were there before them."""

    local: LookupBuffer
    store: StoreBuffer
    server: Server | None = None
    peers: tuple[Peer, ...] = ()
    pipe: tuple[Pipe, ...] = ()
    tasks: frozenset[asyncio.Task[Any]] | None = None


async def everything_is_quiet(watched: Watched) -> None:
    """Wait until nothing is left of calls that have ended.

    :raises AssertionError: something is, and it does not go
    """
    try:
        await until(lambda: not any(_left(watched)), timeout_s=_TIMEOUT_S)
    except TimeoutError:
        if left := ", ".join(_left(watched)):
            raise AssertionError(f"left behind: {left}") from None


def _left(watched: Watched) -> Iterator[str]:
    """Name what is left, with how much."""
    return (f"{name}: {count}" for name, count in _counts(watched) if count)


def _counts(watched: Watched) -> Iterator[tuple[str, int]]:
    yield from _of_buffers(watched.local, watched.store)
    if watched.server is not None:
        yield "links served", len(watched.server._services) - len(watched.peers)
        for services in watched.server._services:
            lookup = services.lookup
            if lookup is not None:
                yield "queries served", len(lookup.selects)
                yield "deliveries served", len(lookup.deliveries)
                yield "charged to a peer", lookup._charged_bytes
            devices = services.devices  # by NCCL: as long as the link
            standing = devices is not None and devices.way is not None
            tasks = sum(len(service.tasks) for service in services.all)
            yield "tasks of services", tasks - standing
            yield from _of_link(services.link, standing)
    for peer in watched.peers:
        yield from _of_peer(peer)
    for pipe in watched.pipe:
        now = pipe.statistics()
        yield "bytes in flight", now.in_flight_bytes
        yield "bytes held", now.held_bytes
        yield "senders", now.waiting_senders
    if watched.tasks is not None:
        for task in tasks_now() - watched.tasks:
            yield f"task {task.get_name()}", 1


def _of_buffers(local: LookupBuffer, store: StoreBuffer) -> Iterator[tuple[str, int]]:
    lookup, now = local.statistics(), store.statistics()
    yield "entries", lookup.entries
    yield "leases", lookup.leased
    yield "arena bytes", lookup.used_bytes
    yield "bytes outside", lookup.outside_bytes
    yield "memory that peers read", sum(lookup.mapped_by.values())
    yield "inserts", lookup.waiting_inserts
    yield "selects", lookup.waiting_selects
    owned = store.values._values.values()
    stored = sum(value.region.nbytes for values in owned for value in values.values())
    yield "bytes of no value", now.used_bytes - stored
    yield "puts", now.waiting_puts


def _of_peer(peer: Peer) -> Iterator[tuple[str, int]]:
    yield "received bytes", peer.budget.used_bytes
    yield "receivers in line", len(peer.budget._line)
    lookup, store = peer.lookup.statistics(), peer.store.statistics()
    yield "selecting", lookup.waiting_selects
    yield "inserting", lookup.waiting_inserts
    yield "getting", store.getting
    yield "putting", store.waiting_puts
    if (link := peer._links.current) is not None:
        yield from _of_link(link, peer.routes.nccl(link) is not None)


def _of_link(link: Link, standing: int) -> Iterator[tuple[str, int]]:
    yield "streams", len(link._session._streams) - standing
    yield "unsent bytes", link.outgoing_bytes
    table: Any = link.payload
    yield "parts awaited", int(table._table.is_waiting)


@dataclasses.dataclass(frozen=True)
class Ground:
    """``producer`` and ``consumer`` are two ways to ``local``, ``client`` to ``store``.

    ``near`` and ``far`` are the ends of a pipe. ``options`` protect a link.
    """

    kind: Kind
    producer: KVLookupBuffer
    consumer: KVLookupBuffer
    local: LookupBuffer
    client: KVStoreBuffer
    store: StoreBuffer
    pipe: tuple[Pipe, Pipe] | None
    options: Mapping[str, Any]
    watched: Watched

    @property
    def is_local(self) -> bool:
        """Whether no link lies between."""
        return self.kind == "local"

    @property
    def scheme(self) -> Scheme:
        """By what others are reached here; in memory where all is local."""
        return "mem" if self.kind == "local" else self.kind

    @property
    def server(self) -> Server:
        """Who serves ``local`` and ``store``.

        :raises RuntimeError: nobody does
        """
        if self.watched.server is None:
            raise RuntimeError("nothing is served here")
        return self.watched.server

    @property
    def ends(self) -> tuple[Pipe, Pipe]:
        """``near`` and ``far``.

        :raises RuntimeError: there is no pipe
        """
        if self.pipe is None:
            raise RuntimeError("there is no pipe")
        return self.pipe

    async def link_to(self, url: str) -> Link:
        """Return a link that asks for nothing; whoever listens there closes it."""
        keyring = make_keyring(None, self.options.get("tls"), False)
        return await dial(url, identity=new_identity(), lanes=1, keyring=keyring)

    async def check_quiet(self) -> None:
        """Wait until nothing is under way.

        :raises AssertionError: something is left, and what
        """
        await everything_is_quiet(self.watched)


@contextlib.asynccontextmanager
async def open_ground(
    kind: Kind, *, max_bytes: int = BUFFER_BYTES, **options: Any
) -> AsyncIterator[Ground]:
    """Open what the scenarios use; ``options`` protect the links (``tls=``).

    ``max_bytes`` is that of the lookup buffer.
    """
    async with (
        one_thread_of_torch(),
        LookupBuffer(max_bytes, drain_s=0, max_deliver=1000) as local,
        StoreBuffer(BUFFER_BYTES) as store,
        contextlib.AsyncExitStack() as stack,
    ):
        watched, pipe = Watched(local, store), None
        sides: tuple[KVLookupBuffer, KVLookupBuffer, KVStoreBuffer]
        sides = local, local, store
        if kind != "local":
            opened = open_peers(kind, local, store, lanes=2, **options)
            server, near, far = await stack.enter_async_context(opened)
            sides = near.lookup, far.lookup, far.store
            pipe = await stack.enter_async_context(
                open_pipe_pair(kind, max_bytes=PIPE_BYTES, **options)
            )
            watched = Watched(local, store, server, (near, far), pipe)
        for _ in range(2):  # the first call of all may make tasks that stay
            await everything_is_quiet(watched)
            watched = dataclasses.replace(watched, tasks=tasks_now())
        yield Ground(
            kind, sides[0], sides[1], local, sides[2], store, pipe, options, watched
        )


@contextlib.asynccontextmanager
async def one_thread_of_torch() -> AsyncIterator[None]:
    """Its others spin while they wait for more: on few cores, against this one."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
