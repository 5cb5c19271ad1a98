"""A served buffer and peers that use it, in one process, over any scheme."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import AsyncIterator
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from asynckv.abc import KVLookupBuffer, KVStoreBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote import Peer, connect
from asynckv.buffers.serve import Server, serve
from asynckv.buffers.store import StoreBuffer

__all__ = (
    "SCHEMES",
    "Peers",
    "Scheme",
    "new_url",
    "open_lookup_pair",
    "open_peers",
    "open_store_pair",
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
