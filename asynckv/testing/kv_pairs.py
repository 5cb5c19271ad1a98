"""Buffers that are served, and one peer of them: what most tests begin with."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any, Final, TypeVar

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote import Peer, connect
from asynckv.buffers.serve import Server, serve
from asynckv.buffers.store import StoreBuffer
from asynckv.testing.faults.fault import Fault
from asynckv.testing.faults.injectors import Injectors
from asynckv.testing.faults.proxy import Proxy
from asynckv.testing.pairs import Scheme, new_url

__all__ = ("KVFaults", "KVPair", "open_kv_faults", "open_kv_pair")

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
