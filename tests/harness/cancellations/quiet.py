"""Whether anything is left of calls that have ended: bytes, leases, waiters, tasks."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer
from asynckv.buffers.serve import Server
from asynckv.buffers.store import StoreBuffer
from asynckv.links.link import Link
from asynckv.pipes.pipe import Pipe
from asynckv.testing.blocked import until

__all__ = ("Watched", "everything_is_quiet", "tasks_now")

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
        left = ", ".join(_left(watched))
        if left:
            raise AssertionError(f"left behind: {left}") from None


def _left(watched: Watched) -> Iterator[str]:
    """Name what is left, with how much."""
    for name, count in _counts(watched):
        if count:
            yield f"{name}: {count}"


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
    lookup = local.statistics()
    yield "entries", lookup.entries
    yield "leases", lookup.leased
    yield "arena bytes", lookup.used_bytes
    yield "bytes outside", lookup.outside_bytes
    yield "memory that peers read", sum(lookup.mapped_by.values())
    yield "inserts", lookup.waiting_inserts
    yield "selects", lookup.waiting_selects
    now = store.statistics()
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
