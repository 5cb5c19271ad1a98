"""Memory that both sides of a pipe read of each other, opened beside the pipe.

Two processes of one host map the memory files that their copies are in; those on GPUs
in reach of each other open the other's memory by CUDA IPC. Nobody waits for it, and
nothing fails without it. What was shown stays where it is until the receiver has
flushed it, or has closed the memory, or is gone: a socket of its own says so. Who asks
is shown the other side's memory first, proves that it reads it, and shows its own.
"""

from __future__ import annotations

import abc
import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ClassVar, Final, TypeAlias

import anyio
import msgspec
import numpy
import numpy.typing
import torch

from asynckv.devices.arena import DeviceRegion
from asynckv.devices.copying import CopyPool
from asynckv.devices.growth import Growth
from asynckv.errors import (
    AsyncKVError,
    ChecksumError,
    ConfigError,
    PeerLost,
    RemoteProtocolError,
)
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.link import Link
from asynckv.links.options import Digest, map_digest, new_identity
from asynckv.protocol.handshake import DigestMode, strictest
from asynckv.protocol.transfer_frames import Exposed, OpenMemory, Sent
from asynckv.protocol.values import Place
from asynckv.sharing.exporter import (
    LEAST_NBYTES,
    Exporter,
    Importer,
    place_of,
    warn_of_loss,
)
from asynckv.sharing.handshake import Handshake
from asynckv.sharing.imports import PeerMemory
from asynckv.sharing.mappings import PeerFile, edges_at, import_file
from asynckv.sharing.peer_imports import check_same_host
from asynckv.tensors.arena import Region
from asynckv.tensors.runs import joined
from asynckv.tensors.views import tensor_over
from asynckv.transfers.outgoing import Outgoing
from asynckv.transfers.read_route import IpcRoute, MapRoute, ReadRoute
from asynckv.transfers.source import Source
from asynckv.types import TensorSpec
from asynckv.waits.waiting import OwnTasks

__all__ = ("AGREE_S", "GpuSharing", "MapSharing", "Opening", "Sharing", "why_not")

logger = logging.getLogger(__name__)

AGREE_S: Final = 10.0

Opening: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

_OTHER_BYTES: Final = "a tensor arrived with other bytes than were sent"


class Sharing(abc.ABC):
    """What one side of a pipe exports of ``growth``, and reads of the peer's.

    ``digest`` is what this side wants to be compared. Of a GPU ``uuid`` is the name.
    """

    what: ClassVar[str]
    """How payload comes where it is open, for the log."""

    otherwise: ClassVar[str]
    """How it comes where that was lost."""

    def __init__(
        self, link: Link, growth: Growth, digest: DigestMode, uuid: str = ""
    ) -> None:
        self.digest: DigestMode = digest
        """What both sides compare, once it is open."""
        self._link = link
        self._growth = growth
        self._wanted: DigestMode = digest
        self._uuid = uuid
        self._exporter = Exporter(growth.arena, drop=growth.drop_soon)
        self._importer: Importer | None = None
        self._numbers = itertools.count(1)
        self._has_begun = False
        self._is_over = False

    @property
    def is_open(self) -> bool:
        """Whether the peer reads here what it is shown, and this side there."""
        return self._has_begun and not self._is_over

    async def ask(self) -> None:
        """Share with the peer.

        Waits until the peer has accepted the pipe, and 10 s from then on. Once that was
        cancelled, or has failed, :meth:`close` is to follow.

        :raises AsyncKVError: the peer, its GPU or this one does not share memory
        :raises ValueError: the peer is on another host
        :raises TimeoutError: the peer, or the GPU, did not answer
        :raises OSError: the process may have no more files
        """
        self._check_here()
        with Handshake.ask(self._link, OpenMemory("pipe", self._uuid)) as handshake:
            # Until the peer accepts the pipe: that is bounded by the link's life.
            exposed = await handshake.exposed
            async with asyncio.timeout(AGREE_S):
                await self._growth.open()
                handshake.prove(await self._import(exposed))
                await self._export(handshake)
            self._begin()

    async def answer(self, handshake: Handshake) -> None:
        """Share with the peer, which has asked for it; as :meth:`ask`.

        :raises AsyncKVError: as there
        :raises ValueError: as there
        :raises TimeoutError: as there
        :raises OSError: as there
        """
        with handshake:
            self._check_here()
            async with asyncio.timeout(AGREE_S):
                await self._growth.open()
                await self._export(handshake)
                nonce = await self._import(await handshake.exposed)
            handshake.check()
            # From here on the peer may say where tensors lie, and so may this side.
            self._begin()
            handshake.prove(nonce)
            handshake.accept()

    def show(self, source: Source, outgoing: Outgoing) -> tuple[Place, bytes] | None:
        """Let the peer read what is sent where it lies, if it can: return where.

        And the digest of it that the peer compares.
        """
        region, importer = source.region, self._importer
        if region is None or importer is None or not self.is_open:
            return None
        if region.is_read_by_peers or not importer.is_usable:
            return None
        if (place := place_of(region)) is None:
            return None
        # What is filled again is new to the peer, which is shown nothing twice.
        place = msgspec.structs.replace(place, generation=next(self._numbers))
        digest = b""
        if self.digest != "off":
            is_whole = self.digest == "full"
            digest = source.digest if is_whole else self._edges(region, source, place)
            if not digest:
                return None
        outgoing.pin(importer, [region])
        return place, digest

    def lose(self, reason: object) -> None:
        """Show and read nothing more; what was shown comes otherwise. Never waits."""
        was_open = self.is_open
        self.close()
        if was_open and self._link.is_open:
            self._link.use_lanes()
            what = "payload of the pipe to"
            warn_of_loss(self._link, what, str(reason), self.otherwise)

    def close(self) -> None:
        """Show nothing more, and close the peer's memory when nothing reads it.

        Never waits.
        """
        self._is_over = True
        self._close_import()

    async def aclose(self) -> None:
        """As :meth:`close`; wait until both sides have closed, about 4 s at most.

        What the peer has not closed then, it keeps. Shielded.
        """
        self.close()
        with anyio.CancelScope(shield=True):
            await self._import_closed()
            await self._exporter.aclose()
        self._exporter.close()

    @abc.abstractmethod
    def claim(self, place: Place, nbytes: int) -> None:
        """The peer has shown a tensor, which lies there until :meth:`release`.

        :raises RemoteProtocolError: it shows nothing, or not there
        """

    @abc.abstractmethod
    def release(self, place: Place) -> None:
        """It is not read any more. Never waits."""

    @abc.abstractmethod
    def route(self, place: Place, digest: bytes) -> ReadRoute | None:
        """Return by what a tensor comes that the peer shows there, if it can."""

    @abc.abstractmethod
    def _edges(self, region: Region, source: Source, place: Place) -> bytes:
        """Return the digest of the first and last bytes; empty if nobody knows it."""

    @abc.abstractmethod
    async def _import(self, exposed: Exposed) -> bytes:
        """Open what the peer exports, agree on the digest, and return its nonce."""

    @abc.abstractmethod
    def _use(self) -> None:
        """Payload of the link goes this way from here on."""

    @abc.abstractmethod
    def _close_import(self) -> None:
        """Close it when nothing reads it. Again is nothing. Never waits."""

    @abc.abstractmethod
    async def _import_closed(self) -> None:
        """Wait until it is closed, 2 s at most."""

    def _check_here(self) -> None:
        if not self._link.may_map or not has_fd_sockets():
            raise ConfigError("no memory is shared with it")
        check_same_host(self._link, new_identity().boot_id)

    async def _export(self, handshake: Handshake) -> None:
        least_nbytes = LEAST_NBYTES if self._uuid else 0
        importer = self._exporter.export(
            self._link, self._wanted, self._uuid, least_nbytes=least_nbytes
        )
        await handshake.export(importer)
        self._importer = importer
        importer.lost = partial(self.lose, "the peer has closed the memory")

    def _begin(self) -> None:
        if self._is_over or not self._link.is_open:
            raise PeerLost("the pipe was closed meanwhile")
        self._has_begun = True
        self._use()
        self._link.call_when_lost(lambda _: self.close())
        peer = self._link.peer.id
        logger.info("payload of the pipe to %s %s", peer, self.what)


class MapSharing(Sharing):
    """Memory of the host: each side maps the other's file, and copies once out of it.

    ``digest`` is the pipe's option.
    """

    what = "is read in memory"
    otherwise = "goes by lanes"

    def __init__(self, link: Link, growth: Growth, digest: Digest) -> None:
        super().__init__(link, growth, map_digest(digest))
        self._file: PeerFile | None = None
        self._pool = CopyPool()
        self._tasks = OwnTasks()

    @property
    def can_read(self) -> bool:
        """Whether what the peer sends can be read where it lies."""
        return self._file is not None and self._file.is_open

    @property
    def compares_edges(self) -> bool:
        """Is it enough to digest the edges of what is sent?"""
        return self.is_open and self.digest != "full"

    def open_soon(self, handshake: Handshake | None = None) -> None:
        """Ask the peer to share memory, or answer it. Never waits."""
        opening = self.ask if handshake is None else partial(self.answer, handshake)
        name = f"asynckv: share memory with {self._link.peer.id}"
        self._tasks.own(self._try(opening), name)

    def claim(self, place: Place, nbytes: int) -> None:
        if self._file is None:
            raise RemoteProtocolError("a tensor in memory that is not mapped")
        self._file.claim(place, nbytes)

    def release(self, place: Place) -> None:
        if self._file is not None:
            self._file.release(place)

    def route(self, place: Place, digest: bytes) -> MapRoute | None:
        if not self.can_read:
            return None
        read = partial(self.read, place, digest)
        told = Sent(0, 0, digest, self.digest)
        return MapRoute(read, self.lose, self._link.progress, self.digest, told)

    async def read(self, place: Place, digest: bytes, target: memoryview) -> None:
        """Copy what the peer has shown, and compare it.

        A cancelled call ends when no thread is at ``target``, which may hold a part
        of it then, as after an error.

        :raises ChecksumError: it is not what was sent
        :raises PeerLost: the peer's memory is closed, or cannot be read
        """
        if self._file is None:
            raise PeerLost("the peer's memory is closed")
        nbytes, kind = target.nbytes, self.digest
        found = b""
        try:
            with self._file.reading(place, nbytes) as memory:
                (found,) = await self._pool.copy(
                    [_flat(memory)], [_flat(target)], digest=kind == "full"
                )
                if kind == "edges":
                    found = edges_at(memory, place.generation)
                del memory  # an error's traceback would keep it mapped
        except OSError as exc:
            if not isinstance(exc, PeerLost):
                self.lose(exc)
            raise PeerLost(f"the peer's memory cannot be read: {exc}") from None
        if kind != "off" and found != digest:
            raise ChecksumError(_OTHER_BYTES)

    def abort(self) -> None:
        """Share nothing more, when the link is over. Never waits."""
        self.close()
        self._tasks.cancel()
        self._pool.close()

    async def aclose(self) -> None:
        self.abort()
        await super().aclose()

    async def _try(self, opening: Opening) -> None:
        try:
            reason = await why_not(opening)
        except BaseException:
            self.close()
            raise
        if reason:
            self.close()
            if self._link.is_open:
                peer = self._link.peer.id
                logger.info("payload of the pipe to %s goes by lanes: %s", peer, reason)

    def _edges(self, region: Region, source: Source, place: Place) -> bytes:
        read = numpy.frombuffer(joined(source.host()), numpy.uint8)
        return edges_at(read, place.generation)

    async def _import(self, exposed: Exposed) -> bytes:
        self._file = file = await import_file(exposed)
        self.digest = strictest(self._wanted, exposed.digest)
        return file.nonce

    def _use(self) -> None:
        self._link.use_map()

    def _close_import(self) -> None:
        if self._file is not None:
            self._file.close()

    async def _import_closed(self) -> None:
        await self._tasks.wait()
        if self._file is not None:
            await self._file.wait_closed()


def _flat(memory: memoryview | numpy.typing.NDArray[numpy.uint8]) -> torch.Tensor:
    return tensor_over(memory, TensorSpec((memory.nbytes,), "uint8"))


class GpuSharing(Sharing):
    """Memory of two GPUs in reach, or of one: what the peer shows is copied by CUDA.

    ``uuid`` names this side's GPU.
    """

    what = "goes by CUDA IPC"
    otherwise = "goes through host memory"

    def __init__(
        self,
        link: Link,
        uuid: str,
        growth: Growth,
        pool: CopyPool,
        digest: DigestMode,
    ) -> None:
        super().__init__(link, growth, digest, uuid)
        self.peer_memory = PeerMemory(self.lose, digest)
        self._pool = pool

    def show(self, source: Source, outgoing: Outgoing) -> tuple[Place, bytes] | None:
        # A copy in memory of the host lies nowhere that the peer has open.
        return super().show(source, outgoing) if source.is_on_gpu else None

    def claim(self, place: Place, nbytes: int) -> None:
        if len(place.runs) != 1:
            raise RemoteProtocolError("a tensor of a GPU in several places")
        self.peer_memory.check(_offset(place), nbytes)

    def release(self, place: Place) -> None:
        """Nothing is claimed: nobody writes to what the peer shows."""

    def route(self, place: Place, digest: bytes) -> IpcRoute | None:
        if not self.is_open:
            return None
        told = Sent(0, 0, digest, self.digest, "cuda_ipc", _offset(place))
        return IpcRoute(
            *(self.peer_memory, self._pool, self._link.progress, self.digest), told=told
        )

    def _edges(self, region: Region, source: Source, place: Place) -> bytes:
        return region.edges if isinstance(region, DeviceRegion) else b""

    async def _import(self, exposed: Exposed) -> bytes:
        if self._growth.open_device is None or self._growth.allocation is None:
            raise ConfigError("this side has no memory of a GPU")
        nonce = await self.peer_memory.open(exposed, self._growth.allocation)
        self.digest = self.peer_memory.digest
        return nonce

    def _use(self) -> None:
        self._link.use_ipc()

    def _close_import(self) -> None:
        self.peer_memory.close()

    async def _import_closed(self) -> None:
        await self.peer_memory.aclose()


def _offset(place: Place) -> int:
    return place.runs[0][0] + place.start


async def why_not(opening: Opening) -> str:
    """Return why something was not opened; empty if it was. No error is kept."""
    try:
        await opening()
    except (AsyncKVError, OSError, TimeoutError, ValueError) as exc:
        return str(exc) or "no answer in time"
    return ""
