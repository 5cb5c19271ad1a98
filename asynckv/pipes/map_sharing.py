"""How both sides of a pipe on one host read each other's memory, beside the pipe.

Nobody waits for it, and nothing fails without it. Each side shows the memory file that
its copies are in; the other one maps it, and copies once out of it, in a thread. What
was shown stays where it is until the receiver has flushed it, or has closed the file,
or is gone: a socket of its own says so.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import ClassVar, Final

import anyio
import msgspec
import numpy
import numpy.typing
import torch

from asynckv.errors import AsyncKVError, ChecksumError, PeerLost, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.links.options import Digest, map_digest, new_identity
from asynckv.links.progress import Progress
from asynckv.protocol.handshake import DigestMode, strictest
from asynckv.protocol.transfer_frames import Exposed, OpenMemory, Sent
from asynckv.protocol.values import Place
from asynckv.sharing.exporter import Exporter, Importer, place_of, warn_of_loss
from asynckv.sharing.gpu_channel import RouteLost
from asynckv.sharing.handshake import Handshake
from asynckv.sharing.peer_files import PeerFile, edges_at, import_file
from asynckv.sharing.peer_imports import check_same_host
from asynckv.shielding import clear_all_frames
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.growth import Growth
from asynckv.tensors.runs import Memory, joined
from asynckv.tensors.slab_regions import SlabRegion
from asynckv.tensors.views import tensor_over
from asynckv.transfers.outgoing import Outgoing
from asynckv.transfers.read_route import DoneCallback, ReadRoute
from asynckv.transfers.source import Source
from asynckv.types import TensorSpec
from asynckv.waits.own_tasks import OwnTasks

__all__ = ("MapRoute", "MapSharing")

logger = logging.getLogger(__name__)

_AGREE_S: Final = 10.0

_OTHER_BYTES: Final = "a tensor arrived with other bytes than were sent"


class MapSharing:
    """What one side of a pipe shows of ``growth``, and maps of the peer's.

    ``digest`` is the pipe's option.
    """

    def __init__(self, link: Link, growth: Growth, digest: Digest) -> None:
        self._link = link
        self._wanted: DigestMode = map_digest(digest)
        self.digest: DigestMode = self._wanted
        """What both sides compare, once it is open."""
        self._exporter = Exporter(growth.arena)
        self._importer: Importer | None = None
        self._file: PeerFile | None = None
        self._numbers = itertools.count(1)
        self._pool = CopyPool()
        self._tasks = OwnTasks()
        self._has_begun = False
        self._is_over = False

    @property
    def is_open(self) -> bool:
        """Whether what this side sends is read where it lies."""
        return self._has_begun and not self._is_over

    @property
    def can_read(self) -> bool:
        """Whether what the peer sends can be read where it lies."""
        return self._file is not None and self._file.is_open

    @property
    def compares_edges(self) -> bool:
        """Is it enough to digest the edges of what is sent?"""
        return self.is_open and self.digest != "full"

    def ask(self) -> None:
        """Share memory with the peer, if it is on this host. Never waits."""
        if self._may_share():
            self._open(self._ask)

    def answer(self, handshake: Handshake) -> None:
        """Share memory with the peer, which has asked for it. Never waits."""
        self._open(partial(self._answer, handshake))

    def show(
        self, region: SlabRegion, source: Source, outgoing: Outgoing
    ) -> tuple[Place, bytes] | None:
        """Let the peer read what is sent where it lies, if it can: return where.

        And the digest of it that the peer compares.
        """
        place, importer = place_of(region), self._importer
        if place is None or importer is None or not importer.is_usable:
            return None
        if not self.is_open or region.is_read_by_peers:
            return None
        # What is filled again is new to the peer, which is shown nothing twice.
        place = msgspec.structs.replace(place, generation=next(self._numbers))
        digest = source.digest if self.digest == "full" else b""
        if self.digest == "edges":
            read = numpy.frombuffer(joined(source.host()), numpy.uint8)
            digest = edges_at(read, place.generation)
        elif self.digest == "full" and not digest:
            return None
        outgoing.pin(importer, [region])
        return place, digest

    def claim(self, place: Place, nbytes: int) -> None:
        """The peer has shown a tensor, which lies there until :meth:`release`.

        :raises RemoteProtocolError: it shows nothing, or not there
        """
        if self._file is None:
            raise RemoteProtocolError("a tensor in memory that is not mapped")
        self._file.claim(place, nbytes)

    def release(self, place: Place) -> None:
        """It is not read any more. Never waits."""
        if self._file is not None:
            self._file.release(place)

    def route(self, place: Place, digest: bytes) -> MapRoute:
        """Return by what a tensor comes that the peer shows there."""
        return MapRoute(self, self._link.progress, place, digest)

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

    def lose(self, reason: object) -> None:
        """Show and read nothing more; what was shown goes by lanes. Never waits."""
        was_open = self.is_open
        self._stop()
        if was_open and self._link.is_open:
            self._link.use_lanes()
            what, way = "payload of the pipe to", "goes by lanes"
            warn_of_loss(self._link, what, str(reason), way)

    def abort(self) -> None:
        """Share nothing more, when the link is over. Never waits."""
        self._stop()
        self._tasks.cancel()
        self._pool.close()

    async def aclose(self) -> None:
        """As :meth:`abort`; wait until both sides have closed, about 4 s at most.

        What the peer has not closed then, it keeps. Shielded.
        """
        self.abort()
        with anyio.CancelScope(shield=True):
            await self._tasks.wait()
            if self._file is not None:
                await self._file.wait_closed()
            await self._exporter.aclose()
        self._exporter.close()

    def _may_share(self) -> bool:
        if not self._link.may_map:
            return False
        try:
            check_same_host(self._link, new_identity().boot_id)
        except ValueError:
            return False
        return True

    def _open(self, opening: Callable[[], Awaitable[None]]) -> None:
        self._link.call_when_lost(lambda _: self._stop())
        name = f"asynckv: share memory with {self._link.peer.id}"
        self._tasks.own(self._try(opening), name)

    async def _try(self, opening: Callable[[], Awaitable[None]]) -> None:
        try:
            await opening()
        except (AsyncKVError, OSError, TimeoutError, ValueError) as exc:
            self._stop()
            if self._link.is_open:
                peer, why = self._link.peer.id, str(exc) or "no answer in time"
                logger.info("payload of the pipe to %s goes by lanes: %s", peer, why)
        except BaseException:
            self._stop()
            raise

    async def _ask(self) -> None:
        with Handshake.ask(self._link, OpenMemory("pipe")) as handshake:
            # Until the peer accepts the pipe: that is bounded by the link's life.
            exposed = await handshake.exposed
            async with asyncio.timeout(_AGREE_S):
                handshake.prove(await self._import(exposed))
                await self._export(handshake)
            self._begin()

    async def _answer(self, handshake: Handshake) -> None:
        with handshake:
            async with asyncio.timeout(_AGREE_S):
                await self._export(handshake)
                nonce = await self._import(await handshake.exposed)
            # From here on the peer may say where tensors lie, and so may this side.
            self._begin()
            handshake.prove(nonce)
            handshake.accept()

    async def _export(self, handshake: Handshake) -> None:
        importer = self._exporter.export(self._link, self._wanted)
        await handshake.export(importer)
        self._importer = importer
        importer.lost = partial(self.lose, "the peer has closed the memory")

    async def _import(self, exposed: Exposed) -> bytes:
        self._file = file = await import_file(exposed)
        self.digest = strictest(self._wanted, exposed.digest)
        return file.nonce

    def _begin(self) -> None:
        if self._is_over or not self._link.is_open:
            raise PeerLost("the pipe was closed meanwhile")
        self._has_begun = True
        self._link.use_map()
        logger.info("payload of the pipe to %s is read in memory", self._link.peer.id)

    def _stop(self) -> None:
        self._is_over = True
        if self._file is not None:
            self._file.close()


class MapRoute(ReadRoute):
    """One tensor that the peer shows at a ``place`` in memory of its host."""

    is_to_gpu: ClassVar[bool] = False

    def __init__(
        self, sharing: MapSharing, progress: Progress, place: Place, digest: bytes
    ) -> None:
        super().__init__(progress, sharing.digest, Sent(0, 0, digest, sharing.digest))
        self._sharing = sharing
        self._place = place

    def _is_there(self, frame: Sent, nbytes: int) -> bool:
        return True  # it was claimed

    def _read(
        self, frame: Sent, target: Memory | DeviceMemory, done: DoneCallback
    ) -> None:
        if not isinstance(target, memoryview):
            raise TypeError("a tensor of a pipe lies in one place")
        reading = self._copy(frame, target, done)
        self._reading.own(reading, "asynckv: read a peer's memory")

    async def _copy(self, frame: Sent, target: memoryview, done: DoneCallback) -> None:
        error: Exception | None = None
        try:
            with self.progress.working(frame.transfer):
                await self._sharing.read(self._place, frame.digest, target)
        except ChecksumError as exc:
            error = exc
        except Exception as exc:  # noqa: BLE001 - whoever waits for it is told
            self._sharing.lose(exc)
            error = RouteLost(exc)
            clear_all_frames(exc)
        done(b"", error)


def _flat(memory: memoryview | numpy.typing.NDArray[numpy.uint8]) -> torch.Tensor:
    return tensor_over(memory, TensorSpec((memory.nbytes,), "uint8"))
