"""A connection to a server of buffers that comes back when it was cut."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cached_property
from types import TracebackType
from typing import Self

from asynckv.abc.closing import AsyncWithOnly
from asynckv.buffers.remote.connection import PeerConnection
from asynckv.buffers.remote.lookup import RemoteLookupBuffer
from asynckv.buffers.remote.store import RemoteStoreBuffer
from asynckv.devices.names import DeviceName, device_named
from asynckv.errors import PeerLost
from asynckv.links.link import Link
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
from asynckv.observability.lines import as_line
from asynckv.protocol.handshake import ONE_FINGERPRINT
from asynckv.security.tls import TLS
from asynckv.types import KVFingerprint, parse_bytes

__all__ = ("Peer", "connect")

logger = logging.getLogger(__name__)


class Peer(PeerConnection, AsyncWithOnly):
    """One server of buffers, while it is entered.

    ``lookup`` and ``store`` are its buffers. A connection that is cut is made
    again for ``reconnect_s`` seconds, and calls that wait go on; a peer that
    says goodbye is not called again.
    """

    _entered_by = "connect(...) as peer"

    def __repr__(self) -> str:
        if self._links.current is None:
            how = "not entered yet"
        elif self.is_connected:
            how = f"connected to {self.identity} by {self.transport}"
        else:
            how = "not connected"
        return f"<Peer at {self.url}, {how}>"

    @cached_property
    def store(self) -> RemoteStoreBuffer:
        """The store buffer that the peer serves."""
        return RemoteStoreBuffer(self)

    @cached_property
    def lookup(self) -> RemoteLookupBuffer:
        """The lookup buffer that the peer serves."""
        if (link := self._links.current) is not None:
            _warn_if_nothing_matches(link)
        return RemoteLookupBuffer(self)

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

        By ``"map"`` entries are read in the peer's own memory, on the same host; what
        goes there moves by lanes.
        """
        return self._linked().transport_name

    async def __aenter__(self) -> Self:
        self._check_loop()
        self._links.check_new()
        try:
            await self._links.open()
        except BaseException as exc:
            if self.on_gpu is not None:
                self.abort()  # its memory does not wait for the garbage collector
            if isinstance(exc, PeerLost):
                exc.with_traceback(None)  # its text says more than frames of ours
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _dial(self, timeout_s: float) -> Link:
        link = await super()._dial(timeout_s)
        if "lookup" in vars(self):
            _warn_if_nothing_matches(link)
        return link


def _warn_if_nothing_matches(link: Link) -> None:
    """Say so, once a link, to those who use the peer's lookup buffer."""
    if link.has_one_fingerprint:
        logger.warning(ONE_FINGERPRINT, as_line(link.peer.id))


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
    :param identity: the name that the server knows this side by; made up by default.
        It is one peer's alone: of two that have it, each link ends the other's
    :param role: what the server reads of this side; it forbids nothing
    :param device: the GPU (``"cuda:0"``) in whose memory to receive; entries of
        a buffer on the same GPU, of a process of this host, are read there, and copied
        from another GPU that it can reach. By default memory of the host
    :raises ConfigError: an option that cannot be honoured; on entering, keys that
        cannot be read, or an address that asks for more protection
    :raises ValueError: ``reconnect_s`` is no time, or ``max_bytes`` no size
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
        lanes=as_lanes(lanes),
        reconnect_s=reconnect_s,
        max_bytes=parse_bytes(max_bytes),
        keyring=make_keyring(secret_file, tls, allow_plaintext),
        device=device_named(device),
    )
