"""A connection to a server of buffers that comes back when it was cut."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Literal, Self

import anyio

from asynckv.abc.closing import AsyncWithOnly
from asynckv.buffers.remote.links import PeerWays, ReconnectingLink
from asynckv.buffers.remote.lookup import RemoteLookupBuffer
from asynckv.buffers.remote.store import RemoteStoreBuffer
from asynckv.links.dial import dial
from asynckv.links.link import Link
from asynckv.links.options import (
    Digest,
    Role,
    device_digest,
    make_keyring,
    map_digest,
    new_identity,
    payload_digest,
)
from asynckv.loops import LoopBound
from asynckv.observability.lines import as_line
from asynckv.protocol.handshake import ONE_FINGERPRINT
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.security.keyring import NO_KEYS, Keyring
from asynckv.security.tls import TLS
from asynckv.sharing.imports import GpuImports
from asynckv.sharing.mappings import Mappings
from asynckv.tensors.devices import Device, DeviceName, device_named
from asynckv.tensors.growth import Growth
from asynckv.transfers.budget import ReceiveBudget
from asynckv.types import KVFingerprint, parse_bytes

__all__ = ("Peer", "connect")

logger = logging.getLogger(__name__)


class Peer(LoopBound, AsyncWithOnly):
    """One server of buffers, while it is entered.

    ``lookup`` and ``store`` are its buffers. A connection that is cut is made
    again for ``reconnect_s`` seconds, and calls that wait go on; a peer that
    says goodbye is not called again. ``ways`` is what payload comes and goes by.
    """

    _made_by = "connect(...)"

    def __init__(
        self,
        url: str,
        *,
        own_identity: PeerIdentity,
        fingerprint: KVFingerprint | None,
        digest: Literal["full", "off"],
        map_digest: Literal["full", "edges", "off"] = "edges",
        device_digest: Literal["full", "edges", "off"] = "full",
        lanes: int | None,
        reconnect_s: float,
        max_bytes: int,
        keyring: Keyring = NO_KEYS,
        device: Device | None = None,
    ) -> None:
        self.url = url
        self.own_identity = own_identity
        self.memory = Growth(max_bytes)
        self.budget = ReceiveBudget(max_bytes, self.memory)
        self.on_gpu = None if device is None else Growth(max_bytes, device=device)
        """Memory of the GPU that deliveries land in, if they are to."""
        self.pool = (self.on_gpu or self.memory).make_pool()
        self._mappings: Mappings | GpuImports
        if self.on_gpu is not None:
            boot_id = own_identity.boot_id
            self._mappings = GpuImports(
                *(self.on_gpu, map_digest, boot_id),
                device_digest=device_digest,
                url=url,
            )
        else:
            self._mappings = Mappings(
                map_digest, own_identity.boot_id, is_forced="payload=map" in url
            )
        self._links = ReconnectingLink(url, reconnect_s, self._dial)
        self.ways = PeerWays(
            *(self._links, self._mappings, self.budget, self.pool, self.on_gpu)
        )
        self._lookup = RemoteLookupBuffer(self)
        self._warned: Link | None = None
        self.store = RemoteStoreBuffer(self)
        self._fingerprint = fingerprint
        self._digest: Literal["full", "off"] = digest
        self._lanes = lanes
        self._keyring = keyring

    def __repr__(self) -> str:
        if self._links.current is None:
            how = "not entered yet"
        elif self.is_connected:
            how = f"connected to {self.identity} by {self.transport}"
        else:
            how = "not connected"
        return f"<Peer at {self.url}, {how}>"

    @property
    def lookup(self) -> RemoteLookupBuffer:
        """The lookup buffer that the peer serves."""
        link = self._links.current
        if link is not None and link.has_one_fingerprint and link is not self._warned:
            self._warned = link
            logger.warning(ONE_FINGERPRINT, as_line(link.peer.id))
        return self._lookup

    @property
    def reconnect_s(self) -> float:
        """For so long a connection that was cut is made again."""
        return self._links.reconnect_s

    @reconnect_s.setter
    def reconnect_s(self, seconds: float) -> None:
        self._links.reconnect_s = seconds

    @property
    def identity(self) -> str:
        """The peer's id."""
        return self._linked().peer.id

    @property
    def incarnation(self) -> str:
        """Changes when the peer has lost its memory."""
        return self._linked().peer.incarnation

    @property
    def role(self) -> str:
        """``"producer"``, ``"consumer"`` or ``"both"``."""
        return self._linked().peer.role

    @property
    def transport(self) -> str:
        """How payload moves now: ``"map"``, ``"cuda_ipc"``, ``"nccl"``, ``"inline"`` or
        ``"mem"``.

        By ``"map"`` entries are read in the peer's own memory, on the same host, or
        in a copy there of what is on its GPU; what goes there moves by lanes.
        """
        return self._linked().transport_name

    @property
    def is_connected(self) -> bool:
        """Whether a request could leave now."""
        return self._links.is_open

    def check(self) -> asyncio.AbstractEventLoop:
        """Return the loop this peer belongs to.

        :raises WrongLoop: it is not the running one
        :raises RuntimeError: the peer was not entered
        """
        loop = self._check_loop()
        self._linked()
        return loop

    def link_nowait(self) -> Link | None:
        """Return the link if it is up, ``None`` while it is made again.

        :raises PeerLost: the peer is gone and did not come back in time
        """
        self._check_loop()
        return self._links.link_nowait()

    async def link(self, incarnation: str = "") -> Link:
        """Return a link that is up, waiting while it is made again.

        A cancelled call leaves no trace.

        :raises PeerLost: the peer is gone and did not come back in time
        :raises PeerRestarted: it is not the ``incarnation`` that was given
        """
        self._check_loop()
        return await self._links.link(incarnation)

    async def __aenter__(self) -> Self:
        self._check_loop()
        self._links.check_new()
        try:
            await self._links.open()
        except BaseException:
            if self.on_gpu is not None:
                self.abort()  # its memory does not wait for the garbage collector
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Say goodbye; what is leased goes back. Bounded, shielded, repeatable."""
        self._check_loop()
        try:
            await self._links.aclose()
        finally:  # also if the task is cancelled: nothing stays open
            self.abort()
            with anyio.CancelScope(shield=True):
                await self._mappings.aclose()
                await self.memory.aclose()
                if self.on_gpu is not None:
                    await self.on_gpu.aclose()

    def abort(self) -> None:
        """Hang up now. Never waits."""
        self._links.abort()
        self.pool.close()
        self._mappings.close()
        self.ways.close()
        self.memory.close()
        if self.on_gpu is not None:
            self.on_gpu.close()

    async def _dial(self, timeout_s: float) -> Link:
        link = await dial(
            self.url,
            identity=self.own_identity,
            fingerprint=self._fingerprint,
            digest=self._digest,
            lanes=self._lanes,
            limits=Limits(max_receive_bytes=self.budget.max_bytes),
            keyring=self._keyring,
            timeout_s=timeout_s,
        )
        try:
            await self._mappings.open(link)
        except BaseException:
            self._mappings.leave(link)
            raise
        return link

    def _linked(self) -> Link:
        return self._links.linked()


def connect(
    url: str,
    *,
    fingerprint: KVFingerprint | Mapping[str, str] | str | None = None,
    reconnect_s: float = 30.0,
    max_bytes: int | float | str = "1GiB",
    digest: Digest = "auto",
    lanes: int | None = None,
    secret_file: str | os.PathLike[str] | None = None,
    tls: TLS | None = None,
    allow_plaintext: bool = False,
    identity: str | None = None,
    role: Role = "both",
    device: DeviceName | None = None,
) -> Peer:
    """Connect to a server of buffers while the returned object is entered.

    ``async with connect("tcp://host:14579") as peer: peer.lookup``. Entering waits 10 s
    at most; a cancelled entering leaves nothing behind.

    :param url: where the server is: its ``server.url``. ``?payload=inline`` reads no
        memory of a server on this host, ``?payload=map`` nothing else
    :param fingerprint: what model this side's KV belongs to: a name, a mapping or a
        :class:`~asynckv.KVFingerprint`. Only what has an equal one is found, so both
        sides need one or neither: beside ``None`` nothing ever matches
    :param reconnect_s: for so long a link that was cut is made again, and calls that
        wait go on; 0: never
    :param max_bytes: bounds what has been received and not been handed over
    :param digest: what is compared of each tensor. ``"auto"``: every byte where bytes
        move, the first and last 4 KiB where they are read in shared memory. ``"full"``:
        every byte. ``"edges"``: as ``"auto"``, between two GPUs as in shared memory.
        ``"off"``: nothing, if both sides say so
    :param lanes: sockets for payload, 1 to 8; the smaller number of both sides counts.
        By default one for two cores, up to 4
    :param secret_file: a file with the secret that both sides must share, for the
        server proves itself too; without it ``ASYNCKV_SECRET_FILE`` or
        ``ASYNCKV_SECRET`` of the environment, if set
    :param tls: this side's certificate, key and authorities, for a ``tls://`` URL
    :param allow_plaintext: reach another machine without TLS, by a secret alone
    :param identity: the name that the server knows this side by; made up by default
    :param role: what the server reads of this side; it forbids nothing
    :param device: the GPU (``"cuda:0"``) in whose memory to receive; entries of
        a buffer on the same GPU, of a process of this host, are read there. By default
        memory of the host
    :raises ConfigError: an option that cannot be honoured; on entering, keys that
        cannot be read, or an address that asks for more protection
    :raises PeerLost: (on entering) nobody serves there, or answers in time
    :raises AuthError: (on entering) the two sides do not share a secret
    :raises IncompatiblePeer: (on entering) the fingerprints differ
    """
    return Peer(
        url,
        own_identity=new_identity(identity, role),
        fingerprint=KVFingerprint.of(fingerprint),
        digest=payload_digest(digest),
        map_digest=map_digest(digest),
        device_digest=device_digest(digest),
        lanes=lanes,
        reconnect_s=reconnect_s,
        max_bytes=parse_bytes(max_bytes),
        keyring=make_keyring(secret_file, tls, allow_plaintext),
        device=device_named(device),
    )
