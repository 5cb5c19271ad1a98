"""Both sides of buffers, pipes and transports, in one process, over any scheme."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

from asynckv.abc import KVLookupBuffer, KVStoreBuffer, PayloadTransport
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import Server, serve
from asynckv.buffers.store import StoreBuffer
from asynckv.links.sockets import wait_readable
from asynckv.pipes.endpoints import listen_pipe, open_pipe
from asynckv.pipes.group import Group, join_group
from asynckv.pipes.pipe import Pipe
from asynckv.testing.blocked import until
from asynckv.testing.faults.fault import Fault
from asynckv.testing.faults.injectors import Injectors
from asynckv.testing.faults.proxy import Proxy
from asynckv.testing.pipe_checks import PIPE_BYTES
from asynckv.transports.inline import InlineTransport
from asynckv.transports.mem import MemTransport

__all__ = (
    "SCHEMES",
    "TRANSPORT_KINDS",
    "KVFaults",
    "KVPair",
    "Peers",
    "Scheme",
    "TransportKind",
    "free_port",
    "new_url",
    "open_group",
    "open_kv_faults",
    "open_kv_pair",
    "open_lookup_pair",
    "open_peers",
    "open_pipe_pair",
    "open_store_pair",
    "open_transport_pair",
)


Scheme: TypeAlias = Literal["tcp", "tls", "unix", "mem", "map"]

SCHEMES: Final[tuple[Scheme, ...]] = ("tcp", "unix", "mem")
"""Every way to reach a served buffer that needs no certificates."""

_OF_BOTH_SIDES: Final = ("secret_file", "tls", "allow_plaintext")

_LOOKUP_BYTES: Final = 4 * 2**20
_STORE_BYTES: Final = 16 * 2**20


class Peers(NamedTuple):
    """A server and two peers of it; each is closed with the pair."""

    server: Server
    producer: Peer
    consumer: Peer


def new_url(scheme: Scheme) -> str:
    """Return a place to serve at that is free.

    Payload moves by lanes there, as between two hosts; with ``"map"``, which is
    TCP too, peers read it in the server's memory (where a system has such).

    :raises ValueError: the scheme is unknown
    """
    if scheme == "map":
        return "tcp://127.0.0.1:0"
    if scheme in ("tcp", "tls"):
        return f"{scheme}://127.0.0.1:0?payload=inline"
    if scheme == "mem":
        return "mem://"
    if scheme == "unix":
        folder = os.environ.get("TMPDIR", "/tmp")
        name = f"asynckv-{secrets.token_hex(8)}.sock"
        return f"unix://{folder}/{name}?payload=inline"
    raise ValueError(f"scheme {scheme!r} is none of {', '.join(SCHEMES)} and tls")


@contextlib.asynccontextmanager
async def open_peers(
    scheme: Scheme,
    lookup: LookupBuffer | None = None,
    store: StoreBuffer | None = None,
    **options: Any,
) -> AsyncIterator[Peers]:
    """Serve ``lookup`` and ``store``, and connect to them twice.

    ``options`` are those of :func:`asynckv.connect`; what protects the link
    counts for the server too.
    """
    shared = {name: options[name] for name in _OF_BOTH_SIDES if name in options}
    async with (
        serve(new_url(scheme), lookup=lookup, store=store, **shared) as server,
        connect(server.url, **options) as producer,
        connect(server.url, **options) as consumer,
    ):
        yield Peers(server, producer, consumer)


@contextlib.asynccontextmanager
async def open_lookup_pair(
    scheme: Scheme = "tcp", **options: Any
) -> AsyncIterator[tuple[KVLookupBuffer, KVLookupBuffer, LookupBuffer]]:
    """Open a producer's side, a consumer's side and the local buffer behind them.

    The buffer holds 4 MiB, as :func:`check_lookup_buffer` wants it. ``options``
    are as in :func:`open_peers`.
    """
    async with (
        LookupBuffer(_LOOKUP_BYTES, drain_s=0) as local,
        open_peers(scheme, local, **options) as peers,
    ):
        yield peers.producer.lookup, peers.consumer.lookup, local


@contextlib.asynccontextmanager
async def open_store_pair(
    scheme: Scheme = "tcp", **options: Any
) -> AsyncIterator[tuple[KVStoreBuffer, StoreBuffer]]:
    """Open a client's side and the local store behind it, of 16 MiB.

    ``options`` are as in :func:`open_peers`.
    """
    async with (
        StoreBuffer(_STORE_BYTES) as local,
        open_peers(scheme, store=local, **options) as peers,
    ):
        yield peers.consumer.store, local


_F = TypeVar("_F", bound=Fault)
_MAX_BYTES: Final = 256 * 2**20
_HEARTBEAT_MS: Final = 200
_RECONNECT_S: Final = 5.0


@dataclasses.dataclass(frozen=True)
class KVPair:
    """``lookup`` and ``store`` live here; ``peer`` reaches them through ``server``.

    ``peer.lookup`` and ``peer.store`` are their far sides.
    """

    lookup: LookupBuffer
    store: StoreBuffer
    server: Server
    peer: Peer


@dataclasses.dataclass(frozen=True)
class KVFaults(KVPair, Injectors):
    """A pair with a proxy between: ``with faults.latency(0.05): ...``.

    ``peer`` comes back for 5 s when its connection is cut, and either side
    notices within a second that the other is silent.
    """

    proxy: Proxy

    def add(self, fault: _F) -> _F:
        """Put ``fault`` between ``peer`` and ``server``."""
        return self.proxy.add(fault)

    @property
    def url(self) -> str:
        """What further peers dial to get the same faults."""
        return self.proxy.url


@contextlib.asynccontextmanager
async def open_kv_pair(
    scheme: Scheme = "mem", *, max_bytes: int | str = _MAX_BYTES, **options: Any
) -> AsyncIterator[KVPair]:
    """Serve a lookup and a store buffer of ``max_bytes``, and connect to them.

    ``options`` are those of :func:`asynckv.connect`. What is still in the buffers
    when this is left is dropped.
    """
    async with (
        LookupBuffer(max_bytes, drain_s=0) as lookup,
        StoreBuffer(max_bytes) as store,
        serve(new_url(scheme), lookup=lookup, store=store) as server,
        connect(server.url, **options) as peer,
    ):
        yield KVPair(lookup, store, server, peer)


@contextlib.asynccontextmanager
async def open_kv_faults(
    scheme: Scheme = "tcp",
    *,
    max_bytes: int | str = _MAX_BYTES,
    heartbeat_ms: int = _HEARTBEAT_MS,
    reconnect_s: float = _RECONNECT_S,
    **options: Any,
) -> AsyncIterator[KVFaults]:
    """As :func:`open_kv_pair`, through a :class:`~asynckv.testing.faults.Proxy`."""
    async with (
        LookupBuffer(max_bytes, drain_s=0) as lookup,
        StoreBuffer(max_bytes) as store,
        serve(new_url(scheme), lookup=lookup, store=store) as server,
        Proxy(server.url, heartbeat_ms=heartbeat_ms) as proxy,
        connect(proxy.url, reconnect_s=reconnect_s, **options) as peer,
    ):
        yield KVFaults(lookup, store, server, peer, proxy)


@contextlib.asynccontextmanager
async def open_pipe_pair(
    scheme: Scheme = "tcp", **options: Any
) -> AsyncIterator[tuple[Pipe, Pipe]]:
    """Open a pipe; the first side has dialled, the second has accepted.

    ``options`` are those of :func:`asynckv.open_pipe`. Without one both sides
    have two lanes and a ``max_bytes`` of 1 MiB, as :func:`check_pipe` wants it. By
    ``"map"`` both sides share their memory already.
    """
    options = {"lanes": 2, "max_bytes": PIPE_BYTES, **options}
    async with (
        listen_pipe(new_url(scheme), **options) as listener,
        open_pipe(listener.url, **options) as near,
        await listener.accept() as far,
    ):
        if scheme == "map":
            await until(lambda: near.transport == far.transport == "map")
        yield near, far


def free_port() -> int:
    """Return a port at which nobody listens now, for :func:`asynckv.join_group`."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def open_group(size: int, **options: Any) -> AsyncIterator[tuple[Group, ...]]:
    """Open every rank of a group, in one process.

    ``options`` are those of :func:`asynckv.join_group`.
    """
    options = {"timeout_s": 10, "max_bytes": PIPE_BYTES, "port": free_port(), **options}
    managers = [
        join_group(rank=rank, size=size, host="127.0.0.1", **options)
        for rank in range(size)
    ]
    async with contextlib.AsyncExitStack() as stack:
        joining = (stack.enter_async_context(manager) for manager in managers)
        yield tuple(await asyncio.gather(*joining))


TransportKind: TypeAlias = Literal["tcp", "unix", "mem"]

TRANSPORT_KINDS: Final[tuple[TransportKind, ...]] = ("tcp", "unix", "mem")
"""Lanes over two kinds of sockets, and memory of one process."""


@contextlib.asynccontextmanager
async def open_transport_pair(
    kind: TransportKind,
    near_lost: Callable[[Exception], None],
    far_lost: Callable[[Exception], None],
    *,
    digest: bool = True,
    lanes: int = 2,
) -> AsyncIterator[tuple[PayloadTransport, PayloadTransport]]:
    """Open both ends; they are closed when it is left, whatever was done to them."""
    make = MemTransport if kind == "mem" else InlineTransport
    loop = asyncio.get_running_loop()
    near = make(lanes, digest, loop, near_lost)
    far = make(lanes, digest, loop, far_lost)
    channels: tuple[object, object] = (far, near)
    if kind != "mem":
        with contextlib.ExitStack() as stack:
            pairs = []
            for _ in range(lanes):
                pairs.append(await _connected(kind))
                for sock in pairs[-1]:
                    stack.enter_context(sock)
            stack.pop_all()
        channels = ([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    async with contextlib.aclosing(far), contextlib.aclosing(near):
        await near.open(far.describe(), channels[0])
        await far.open(near.describe(), channels[1])
        yield near, far


async def _connected(kind: TransportKind) -> tuple[socket.socket, socket.socket]:
    if kind == "unix":
        return socket.socketpair()
    near = socket.socket()
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for sock in (near, listener):
                sock.setblocking(False)
            # Plain calls: a cancellation could lose what is accepted.
            with contextlib.suppress(BlockingIOError):
                near.connect(listener.getsockname())
            await wait_readable(listener)
            return near, listener.accept()[0]
    except BaseException:
        near.close()
        raise
