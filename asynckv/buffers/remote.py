"""A connection to a server of buffers that comes back when it was cut."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Final, Literal, Self

import anyio

from asynckv.buffers.backoff import Backoff
from asynckv.buffers.getting import GettingBy
from asynckv.buffers.gpu_staging import GpuStaging
from asynckv.buffers.importing import GpuImports, ImportedMemory
from asynckv.buffers.ipc_reader import IpcReader
from asynckv.buffers.lifted_reader import LiftedReader
from asynckv.buffers.manifest import INLINE_NBYTES
from asynckv.buffers.map_reader import MapReader
from asynckv.buffers.mapped import MappedMemory, Mappings
from asynckv.buffers.receive_budget import ReceiveBudget
from asynckv.buffers.remote_lookup import RemoteLookupBuffer
from asynckv.buffers.remote_store import RemoteStoreBuffer
from asynckv.buffers.watchers import Watchers
from asynckv.errors import AsyncKVError, PeerLost, PeerRestarted
from asynckv.links.dial import dial
from asynckv.links.gpu_arrivals import GpuArrivals
from asynckv.links.gpu_link import GpuLink
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
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.security.keyring import NO_KEYS, Keyring
from asynckv.security.tls import TLS
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.devices import Device, DeviceName, device_named
from asynckv.tensors.growth import Growth
from asynckv.types import KVFingerprint, parse_bytes

__all__ = ("Peer", "connect")

logger = logging.getLogger(__name__)

_DIAL_S: Final = 10.0


class Peer(LoopBound):
    """One server of buffers, while it is entered.

    ``lookup`` and ``store`` are its buffers. A connection that is cut is made
    again for ``reconnect_s`` seconds, and calls that wait go on; a peer that
    says goodbye is not called again. While links are cut before they have
    answered anything, the pauses between them grow to 1 s.
    """

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
        self._readers: dict[str, MapReader] = {}
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
        self.lookup = RemoteLookupBuffer(self)
        self.store = RemoteStoreBuffer(self)
        self._fingerprint = fingerprint
        self._digest: Literal["full", "off"] = digest
        self._lanes = lanes
        self._keyring = keyring
        self.reconnect_s = reconnect_s
        self._link: Link | None = None
        self._error: PeerLost | None = None
        self._is_closing = False
        self._reconnecting: asyncio.Task[None] | None = None
        self._backoff = Backoff()
        self._watchers = Watchers()

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
        return self._link is not None and self._link.is_open

    def reader(self, link: Link, *, views: bool) -> MapReader | None:
        """Return what reads the memory that ``link`` shows, if it does."""
        name = "views" if views else "copies"
        return self._reader(name, self._mappings.of(link), views=views)

    @property
    def reads_gpu_memory(self) -> bool:
        """Are entries read in the peer's memory of this side's own GPU now?"""
        link = self._link
        return (
            link is not None
            and link.is_open
            and isinstance(self._mappings.of(link), ImportedMemory)
        )

    def getting_by(self, link: Link) -> GettingBy:
        """Return what stored values come by, and land in."""
        reader = self._reader("store", self._mappings.of_store(link), views=False)
        ways = None if self.on_gpu is None else self
        return GettingBy(self.budget, self.pool, reader, ways)

    def _reader(
        self, name: str, memory: MappedMemory | None, *, views: bool
    ) -> MapReader | None:
        if memory is None:
            return None
        reader = self._readers.get(name)
        if reader is None or reader.memory is not memory:
            reader = self._readers[name] = self._new_reader(memory, views=views)
        return reader

    def way(self, link: Link) -> GpuLink | None:
        """Return what moves payload between the peer's GPU and this one, if it does."""
        ways = self._mappings
        return ways.way(link) if isinstance(ways, GpuImports) else None

    def arrivals(self, link: Link) -> GpuArrivals | None:
        """Return by what a delivery may come from the peer's GPU, if it may."""
        way = self.way(link)
        if way is None or not isinstance(self.pool, DeviceCopyPool):
            return None
        return GpuArrivals(way, self.pool)

    def staging(self, nbytes: int) -> GpuStaging | None:
        """Return where copies are made of so much for the peer's GPU, if it may go."""
        link = self._link
        if nbytes <= INLINE_NBYTES or link is None or self.way(link) is None:
            return None
        return GpuStaging(self.on_gpu or self.memory, self.pool)

    def _new_reader(self, memory: MappedMemory, *, views: bool) -> MapReader:
        if isinstance(memory, ImportedMemory) and isinstance(self.pool, DeviceCopyPool):
            return IpcReader(memory, self.pool, views=views)
        if self.on_gpu is not None:
            return LiftedReader(memory, self.pool)
        return MapReader(memory, self.pool, views=views)

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
        link = self._link or self._linked()
        if self._error is not None:
            raise PeerLost(self._error.message, hint=self._error.hint)
        return link if link.is_open else None

    async def link(self, incarnation: str = "") -> Link:
        """Return a link that is up, waiting while it is made again.

        A cancelled call leaves no trace.

        :raises PeerLost: the peer is gone and did not come back in time
        :raises PeerRestarted: it is not the ``incarnation`` that was given
        """
        while (link := self.link_nowait()) is None:
            await self._watchers.next_change()
        if incarnation and link.peer.incarnation != incarnation:
            raise PeerRestarted(
                f"{self.url} came back without its memory",
                hint="what was under way is gone; make the call again",
            )
        return link

    async def __aenter__(self) -> Self:
        self._check_loop()
        if self._link is not None or self._is_closing:
            raise RuntimeError("the peer was entered before; connect again")
        try:
            self._use(await self._dial(_DIAL_S))
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
        self._end(PeerLost(f"the connection to {self.url} was closed on this side"))
        try:
            with anyio.CancelScope(shield=True):
                if self._reconnecting is not None:
                    self._reconnecting.cancel()
                    await asyncio.wait({self._reconnecting})
                if self._link is not None:
                    await self._link.aclose()
        finally:  # also if the task is cancelled: nothing stays open
            self.abort()
            with anyio.CancelScope(shield=True):
                await self._mappings.aclose()
                await self.memory.aclose()
                if self.on_gpu is not None:
                    await self.on_gpu.aclose()

    def abort(self) -> None:
        """Hang up now. Never waits."""
        self._end(PeerLost(f"the connection to {self.url} was aborted on this side"))
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        if self._link is not None:
            self._link.abort()
        self.pool.close()
        self._mappings.close()
        self._readers.clear()
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

    def _use(self, link: Link) -> None:
        self._link = link
        link.call_when_lost(partial(self._on_lost, link))
        self._watchers.wake()

    def _on_lost(self, link: Link, error: PeerLost) -> None:
        if self._is_closing or link is not self._link:
            return
        if link.was_answered:
            self._backoff.reset()
        cause = error.__cause__
        ours = isinstance(cause, Exception) and not isinstance(cause, OSError)
        if error.goodbye or ours or self.reconnect_s <= 0:
            # What broke the rules of the wire once would do so again.
            self._end(error)
        else:
            logger.info("the link to %s was lost; dialling again", self.url)
            self._reconnecting = asyncio.get_running_loop().create_task(
                self._reconnect(error), name=f"asynckv: reconnect to {self.url}"
            )

    async def _reconnect(self, lost: PeerLost) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.reconnect_s
        await asyncio.sleep(self._backoff.next_pause_s())
        while (left_s := deadline - loop.time()) > 0:
            try:
                link = await self._dial(min(left_s, _DIAL_S))
            except (PeerLost, OSError, TimeoutError):
                await asyncio.sleep(self._backoff.next_pause_s())
            except AsyncKVError as exc:
                self._end(PeerLost(f"{self.url} refuses this peer now: {exc}"))
                return
            else:
                self._use(link)
                return
        self._end(
            PeerLost(
                f"{lost.message}, and {self.url} could not be reached again within "
                f"{self.reconnect_s:g} s",
                hint="is its process alive? connect(reconnect_s=...) waits longer",
            )
        )

    def _end(self, error: PeerLost) -> None:
        self._is_closing = True
        self._error = self._error or error
        self._watchers.wake()

    def _linked(self) -> Link:
        if self._link is None:
            raise RuntimeError("the peer is not connected; use 'async with connect()'")
        return self._link


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

    ``max_bytes`` bounds what has been received and not been handed over.
    ``secret_file``, ``tls`` and ``allow_plaintext`` are as in
    :func:`asynckv.serve`: the server has to prove itself too.

    With ``device="cuda:0"`` what is received is in memory of that GPU; entries and
    values of a buffer on the same GPU, of a process of this host, are read there.

    :raises ConfigError: an option that cannot be honoured; on entering, keys that
        cannot be read, or an address that asks for more protection
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
