"""Buffers of this process, for peers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Final, Literal, Self

import anyio

from asynckv.abc.closing import AsyncWithOnly
from asynckv.affinity import LoopBound
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serving.devices import DeviceService
from asynckv.buffers.serving.lookup import LookupService
from asynckv.buffers.serving.service import (
    LinkBytes,
    LinkServices,
    RequestTimes,
    Service,
    WaitingBytes,
)
from asynckv.buffers.serving.store import StoreService
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import ConfigError
from asynckv.links.link import Link
from asynckv.links.listen import LinkListener, listen
from asynckv.links.options import (
    Digest,
    Role,
    as_lanes,
    device_digest,
    make_keyring,
    map_digest,
    new_identity,
    payload_digest,
)
from asynckv.observability.latencies import Latencies
from asynckv.observability.lines import as_line
from asynckv.protocol.handshake import ONE_FINGERPRINT, DigestMode
from asynckv.protocol.values import PeerIdentity
from asynckv.security.keyring import NO_KEYS, Keyring
from asynckv.security.names import canonical
from asynckv.security.tls import TLS
from asynckv.types import as_timeout, parse_bytes

__all__ = ("Server", "serve")

logger = logging.getLogger(__name__)

_NO_TENANT: Final = "no tenant has the certificate of %s: it shares what others have"


class _Services(LinkServices):
    """Those of one link; a lookup buffer's know those of the peer's links before."""

    def __init__(
        self,
        link: Link,
        what: str,
        times: RequestTimes,
        *,
        lookup: LookupService | None,
        store: StoreService | None,
    ) -> None:
        self.lookup = lookup
        self.store = store
        self.devices = None if lookup is None else lookup.devices
        every = (lookup, store, self.devices)
        there = [service for service in every if service is not None]
        super().__init__(link, what, times, there)


class Server(LoopBound, AsyncWithOnly):
    """Serves buffers that it was given, and leaves them as they are.

    Leaving it refuses new requests, lets deliveries under way end (at most
    ``drain_s``), says goodbye and hangs up.
    """

    _entered_by = "serve(...) as server"

    def __init__(
        self,
        url: str,
        lookup: LookupBuffer | None,
        store: StoreBuffer | None,
        *,
        digest: Literal["full", "off"],
        map_digest: DigestMode = "edges",
        device_digest: DigestMode = "full",
        lanes: int | None,
        identity: PeerIdentity,
        max_waiting_bytes: int,
        keyring: Keyring = NO_KEYS,
        tenants: Mapping[str, str] | None = None,
        drain_s: float = 30.0,
    ) -> None:
        self.identity = identity
        self._asked_url = url
        self._lookup = lookup
        self._store = store
        given = {"a lookup buffer": lookup, "a store": store}
        self._what = " and ".join(
            name for name, one in given.items() if one is not None
        )
        self._listen = partial(
            listen,
            url,
            identity=identity,
            digest=digest,
            lanes=lanes,
            keyring=keyring,
            max_unfinished_bytes=max_waiting_bytes,
        )
        self._map_digest: DigestMode = map_digest
        self._device_digest: DigestMode = device_digest
        self._tenants = {
            canonical(name): tenant for tenant, name in (tenants or {}).items()
        }
        self._drain_s = as_timeout(drain_s, "drain_s")
        self._listener: LinkListener | None = None
        self._is_draining = False
        self._services: set[_Services] = set()
        self._lost_callbacks: list[Callable[[PeerIdentity], None]] = []
        self._waiting = WaitingBytes(max_waiting_bytes)
        self._times = RequestTimes()

    def __repr__(self) -> str:
        if self._listener is None:
            return f"<Server for {self._asked_url}, not entered yet>"
        return f"<Server of {self._what} at {self.url}, {len(self.peers)} peers>"

    @property
    def waiting_bytes(self) -> int:
        """What requests that wait, or are under way, keep beside the buffers."""
        return self._waiting.used_bytes

    @property
    def refused_requests(self) -> int:
        """How many requests got ``Overloaded``, because of ``max_waiting_bytes``."""
        return self._waiting.refused

    @property
    def request_latencies(self) -> Mapping[str, Latencies]:
        """How long requests took here, by what was asked: ``"get"``, ``"insert"``...

        A get lasts until the peer has the value, verified, a put until it is stored, an
        insert until the entry is in. What failed or was cancelled is not counted.
        """
        return self._times.latencies()

    @property
    def url(self) -> str:
        """Where peers connect, with the real port.

        :raises RuntimeError: it was not entered yet
        """
        if self._listener is None:
            raise RuntimeError("the server has no address before it is entered")
        return self._listener.url

    @property
    def peers(self) -> tuple[PeerIdentity, ...]:
        """Who is connected now."""
        return tuple(s.link.peer for s in self._services if not s.is_lost)

    def call_when_lost(self, callback: Callable[[PeerIdentity], None]) -> None:
        """Call back with each peer that is gone, or that is back as another one."""
        self._lost_callbacks.append(callback)

    async def __aenter__(self) -> Self:
        self._check_loop()
        if self._listener is not None:
            raise RuntimeError("the server was entered before; make a new one")
        buffers = [b for b in (self._lookup, self._store) if b is not None]
        for buffer in buffers:
            buffer._check_loop()
        if self._lookup is not None:
            await self._lookup.open()
        fingerprints = {b.fingerprint for b in buffers if b.fingerprint is not None}
        if len(fingerprints) > 1:
            raise ConfigError("lookup and store have different fingerprints")
        self._listener = await self._listen(
            service_for=self._services_for,
            fingerprint=next(iter(fingerprints), None),
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._close(self._drain_s if exc_type is None else 0)

    def stop_accepting(self) -> None:
        """Let nobody connect any more. Who is connected goes on. Never waits."""
        if self._listener is not None:
            self._listener.stop_accepting()

    async def aclose(self, *, drain_s: float | None = None) -> None:
        """Leave as the context manager does. May be called again.

        With ``drain_s``, deliveries under way have so long to end. A cancelled call
        hangs up at once.

        :raises ValueError: ``drain_s`` is negative, or NaN
        """
        await self._close(
            self._drain_s if drain_s is None else as_timeout(drain_s, "drain_s")
        )

    def abort(self) -> None:
        """Hang up now. Never waits."""
        if self._listener is not None:
            self._listener.abort()
        for service in self._open_services():
            service.abort()

    async def _close(self, drain_s: float) -> None:
        if self._listener is None:
            return
        self._check_loop()
        self._is_draining = True
        known = self._open_services()  # those are forgotten whose link is lost
        for service in known:
            service.drain()
        with anyio.CancelScope(shield=True):
            try:
                with anyio.move_on_after(drain_s):
                    for service in self._open_services():
                        await service.wait_idle()
                await self._listener.aclose()
            finally:  # also if the task is cancelled: nothing stays open
                self.abort()
                for service in {*known, *self._open_services()}:
                    await service.wait_ended()

    def _open_services(self) -> list[Service]:
        return [service for services in self._services for service in services.all]

    def _services_for(self, link: Link) -> _Services:
        kept, lookup, store = self._waiting.for_link(), None, None
        if self._lookup is not None:
            lookup = self._lookup_service(self._lookup, link, kept)
        if self._store is not None:
            tenant = self._tenant_of(link)
            store = StoreService(self._store.values, link, kept, tenant)
        services = _Services(
            *(link, self._what, self._times), lookup=lookup, store=store
        )
        for service in services.all:
            if self._is_draining:
                service.drain()
        self._services.add(services)
        link.call_when_lost(lambda error: self._on_lost(services))
        return services

    def _tenant_of(self, link: Link) -> str:
        for name in link.certified_names:
            if name in self._tenants:
                return self._tenants[name]
        if self._tenants:
            names = ", ".join(link.certified_names) or link.peer.id
            logger.warning(_NO_TENANT, as_line(names))
        return ""

    def _lookup_service(
        self, buffer: LookupBuffer, link: Link, kept: LinkBytes
    ) -> LookupService:
        if link.has_one_fingerprint:
            logger.warning(ONE_FINGERPRINT, as_line(link.peer.id))
        devices = DeviceService(
            *(buffer, link, self._device_digest),
            may_use_nccl="payload=" not in self._asked_url,
            map_digest=self._map_digest,
        )
        service = LookupService(buffer, link, kept, devices, self._map_digest)
        service.predecessors = tuple(
            older.lookup
            for older in self._services
            if older.lookup is not None and older.link.peer.id == link.peer.id
        )
        return service

    def _on_lost(self, services: _Services) -> None:
        services.is_lost = True
        if services.lookup is not None:  # else each keeps the one before it
            services.lookup.predecessors = ()
        for service in services.all:
            service.call_when_ended(lambda: self._forget_ended(services))
        self._forget_ended(services)
        if (peer := services.link.peer) not in self.peers:
            for callback in self._lost_callbacks:
                callback(peer)

    def _forget_ended(self, services: _Services) -> None:
        """Keep those of a lost link only while a task of theirs has not ended."""
        if services.has_ended:
            self._services.discard(services)


def serve(
    url: str,
    *,
    lookup: LookupBuffer | None = None,
    store: StoreBuffer | None = None,
    digest: Digest = "auto",
    lanes: int | None = None,
    secret_file: str | os.PathLike[str] | None = None,
    tls: TLS | None = None,
    allow_plaintext: bool = False,
    identity: str | None = None,
    role: Role = "both",
    max_waiting_bytes: int | float | str = "256MiB",
    tenants: Mapping[str, str] | None = None,
) -> Server:
    """Serve buffers at ``url`` while the returned object is entered.

    ``async with serve("tcp://127.0.0.1:0", lookup=buffer) as server:
    server.url``. The buffers stay the caller's to close.

    With a secret only peers that prove that they share it are served; with a
    ``tls://`` URL, only those with a certificate. An address that other machines can
    reach needs one of the two, and, without TLS, ``allow_plaintext=True``.

    :param url: where: ``"tcp://127.0.0.1:0"`` (port 0: a free one), ``"tls://..."``,
        ``"unix:///run/kv.sock"``, or ``"mem://name"`` within this process.
        ``?payload=inline`` shares no memory with peers of this host
    :param lookup: the lookup buffer that peers see as ``peer.lookup``
    :param store: the store buffer that peers see as ``peer.store``
    :param digest: what is compared of each tensor. ``"auto"``: every byte where bytes
        move, the first and last 4 KiB where they are read in shared memory. ``"full"``:
        every byte. ``"edges"``: as ``"auto"``, between two GPUs as in shared memory.
        ``"off"``: nothing, if both sides say so
    :param lanes: sockets for payload, 1 to 8; the smaller number of both sides counts.
        By default one for two cores, up to 4
    :param secret_file: a file with the secret that peers must have; without it
        ``ASYNCKV_SECRET_FILE`` or ``ASYNCKV_SECRET`` of the environment, if set
    :param tls: this side's certificate, key and authorities, for a ``tls://`` URL
    :param allow_plaintext: serve other machines without TLS, by a secret alone
    :param identity: the name that peers know this side by; made up by default
    :param role: what peers read as ``peer.role``; it forbids nothing
    :param max_waiting_bytes: bounds what queries that wait keep beside the buffers
        (their tokens and 2 KiB each), and as much what inserts and puts keep; of one
        peer a half of that. A request beyond it is refused with ``Overloaded``. As
        much, or 32 MiB, may be kept of requests of which a part has come: beyond that
        a link ends that has more than an equal share of it
    :param tenants: the name of each tenant of the store, and the one that peers of it
        are certified for: they see the values of that tenant, and nobody else does.
        All other peers share what belongs to no tenant. For ``tls://`` URLs alone
    :raises ConfigError: an option that cannot be honoured; on entering, keys that
        cannot be read, or an address that asks for more protection
    :raises ValueError: nothing to serve
    :raises TypeError: ``lookup`` or ``store`` is a buffer of the other kind
    """
    if lookup is None and store is None:
        raise ValueError("nothing to serve: pass lookup=, store= or both")
    if not isinstance(lookup, LookupBuffer | None):
        raise TypeError(f"lookup is a LookupBuffer, not a {type(lookup).__name__}")
    if not isinstance(store, StoreBuffer | None):
        raise TypeError(f"store is a StoreBuffer, not a {type(store).__name__}")
    _check_tenants(tenants or {}, tls)
    return Server(
        url,
        lookup,
        store,
        digest=payload_digest(digest),
        map_digest=map_digest(digest),
        device_digest=device_digest(digest),
        lanes=as_lanes(lanes),
        identity=new_identity(identity, role),
        keyring=make_keyring(secret_file, tls, allow_plaintext),
        max_waiting_bytes=parse_bytes(max_waiting_bytes),
        tenants=tenants,
    )


def _check_tenants(tenants: Mapping[str, str], tls: TLS | None) -> None:
    """:raises ConfigError: nothing proves who is whose, or two have one name"""
    if tenants and tls is None:
        raise ConfigError(
            "tenants are told apart by certificates, and there are none",
            hint="serve at tls://..., with tls=TLS(...)",
        )
    if len({*map(canonical, tenants.values())}) < len(tenants):
        raise ConfigError("one certificate is that of two tenants")
    for tenant in tenants:
        if not tenant or not tenant.isprintable():
            raise ConfigError(f"{tenant!r} is no name of a tenant")
