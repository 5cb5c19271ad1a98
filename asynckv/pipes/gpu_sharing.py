"""How a pipe's GPUs are connected: beside the pipe, and nobody waits for it.

If both GPUs are of one host, or are the same, each side reads the other's memory by
CUDA IPC and copies out of it, on its GPU; where that cannot be, NCCL is the way.
Nothing fails without it. A tensor stays where its sender has it until the receiver has
flushed it, or has closed the memory: a socket of its own says so, also of who was
killed. Who asks is shown the other side's memory first, proves that it reads it, and
shows its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from asynckv.errors import AsyncKVError, ConfigError, PeerLost, RemoteProtocolError
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.link import Link
from asynckv.links.options import new_identity
from asynckv.protocol.handshake import DigestMode
from asynckv.protocol.transfer_frames import (
    Exposed,
    OpenDevices,
    OpenMemory,
    Sent,
)
from asynckv.protocol.values import Place
from asynckv.sharing.exporter import (
    LEAST_NBYTES,
    Exporter,
    Importer,
    place_of,
    warn_of_loss,
)
from asynckv.sharing.gpu_channel import DeviceStream, GpuLink
from asynckv.sharing.handshake import Handshake
from asynckv.sharing.imports import PeerMemory
from asynckv.sharing.peer_imports import check_same_host
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.device_regions import DeviceRegion
from asynckv.tensors.devices import Device
from asynckv.tensors.growth import Growth
from asynckv.transfers.outgoing import Outgoing
from asynckv.transfers.read_route import IpcRoute
from asynckv.transfers.source import Source
from asynckv.waits.own_tasks import OwnTasks

__all__ = (
    "AGREE_S",
    "GpuOpening",
    "GpuSharing",
)


logger = logging.getLogger(__name__)

AGREE_S: Final = 10.0


class GpuSharing:
    """What one side of a pipe exports of ``growth``, and reads of the peer's.

    ``uuid`` names the GPU, and ``digest`` is what this side wants to be compared.
    """

    def __init__(
        self,
        link: Link,
        uuid: str,
        growth: Growth,
        pool: DeviceCopyPool,
        digest: DigestMode,
    ) -> None:
        self._link = link
        self._uuid = uuid
        self._growth = growth
        self._pool = pool
        self._wanted: DigestMode = digest
        self._exporter = Exporter(growth.arena, drop=growth.drop_soon)
        self._importer: Importer | None = None
        self.peer_memory = PeerMemory(self._lost, digest)
        self._has_begun = False
        self._is_over = False

    @property
    def digest(self) -> DigestMode:
        """What both sides compare, once it is open."""
        return self.peer_memory.digest

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

    def show(
        self, region: DeviceRegion, source: Source, outgoing: Outgoing
    ) -> tuple[Place, bytes] | None:
        """Let the peer read what is sent where it lies, if it can: return where.

        And the digest of it that the peer compares.
        """
        place, importer = place_of(region), self._importer
        if place is None or importer is None or not self.is_open:
            return None
        outgoing.pin(importer, [region])
        known = {"full": source.digest, "edges": region.edges, "off": b""}
        return place, known[self.digest]

    def check(self, place: Place, nbytes: int) -> None:
        """Raise if the peer shows what is not within its memory.

        :raises RemoteProtocolError: it does
        """
        if len(place.runs) != 1:
            raise RemoteProtocolError("a tensor of a GPU in several places")
        self.peer_memory.check(_offset(place), nbytes)

    def route(self, place: Place, digest: bytes) -> IpcRoute | None:
        """Return by what a tensor comes that the peer shows there, if it can."""
        if not self.is_open:
            return None
        return IpcRoute(
            *(self.peer_memory, self._pool, self._link.progress, self.digest),
            is_kept=False,
            told=Sent(0, 0, digest, self.digest, "cuda_ipc", _offset(place)),
        )

    def close(self) -> None:
        """Show nothing more, and close the peer's memory when nothing reads it.

        Never waits.
        """
        if not self._is_over:
            self._is_over = True
            self._exporter.close()
            self.peer_memory.close()

    async def aclose(self) -> None:
        """As :meth:`close`; wait until both sides have closed, about 4 s at most.

        What the peer has not closed then, it keeps.
        """
        self.close()
        await self.peer_memory.aclose()
        await self._exporter.aclose()

    def _check_here(self) -> None:
        if not self._link.may_map or not has_fd_sockets():
            raise ConfigError("no memory is shared with it")
        check_same_host(self._link, new_identity().boot_id)

    async def _import(self, exposed: Exposed) -> bytes:
        pages = self._growth.device_pages
        if pages is None or not pages.is_open:
            raise ConfigError("this side has no memory of a GPU")
        return await self.peer_memory.open(exposed, pages.allocation)

    async def _export(self, handshake: Handshake) -> None:
        importer = self._exporter.export(
            self._link, self._wanted, self._uuid, least_nbytes=LEAST_NBYTES
        )
        await handshake.export(importer)
        self._importer = importer
        importer.lost = partial(self._lost, "the peer has closed the memory")

    def _begin(self) -> None:
        if self._is_over:
            raise PeerLost("the pipe was closed meanwhile")
        self._has_begun = True
        self._link.use_ipc()
        self._link.call_when_lost(lambda _: self.close())
        peer = self._link.peer.id
        logger.info("payload of the pipe to %s goes by CUDA IPC", peer)

    def _lost(self, reason: object) -> None:
        was_open = self.is_open
        self.close()
        if was_open and self._link.is_open:
            self._link.use_lanes()
            warn_of_loss(self._link, "payload of the pipe to", str(reason))


def _offset(place: Place) -> int:
    return place.runs[0][0] + place.start


class GpuOpening:
    """Opens what leads from a pipe's GPU to its peer's.

    ``memory`` of the GPU is allocated when the peer's goes with it, and ``failed`` is
    called when nothing leads there. ``digest`` is what this side wants to be compared.
    """

    def __init__(
        self,
        link: Link,
        device: Device,
        memory: Growth,
        sharing: GpuSharing,
        digest: DigestMode,
        *,
        failed: Callable[[], None],
    ) -> None:
        self._link, self._device, self._digest = link, device, digest
        self._memory, self._sharing, self._failed = memory, sharing, failed
        self._way: GpuLink | None = None
        self._openings = OwnTasks()
        self._has_told = False
        self._is_asked = asyncio.Event()

    @property
    def way(self) -> GpuLink | None:
        """What moves payload between two GPUs, while it does."""
        way = self._way
        return way if way is not None and way.is_open else None

    @property
    def agreed_way(self) -> GpuLink | None:
        """That, also while only the peer knows that it is open, or this side that it
        is over.
        """
        return self._way

    def ask(self) -> None:
        """Open the way: this side begins. Never waits."""
        self._open(self._ask)

    def answer(self, channel: DeviceStream, frame: OpenDevices) -> None:
        """Open the way that the peer has asked for. Never waits."""
        self._open(partial(self._answer, channel, frame))
        self._is_asked.set()

    def share(self, handshake: Handshake) -> None:
        """Share memory with the peer, which has asked for it. Never waits."""
        self._open(partial(self._share, handshake))

    async def settled(self) -> None:
        """Wait until the way is open, or is known not to be."""
        while len(self._openings):
            await self._openings.wait()

    async def let_meet(self) -> None:
        """Let both GPUs' workers meet that are about to, for 1 s. Shielded.

        To be called before the link is closed: the peer's could wait for this one in a
        call that nobody can end.
        """
        if self._way is not None and self._way.is_opening:
            await self._way.aclose()

    def abort(self) -> None:
        """Open nothing more, and close what is open. Never waits."""
        self._openings.cancel()
        self.close()

    async def wait_closed(self) -> None:
        """Wait until what was aborted is over: :meth:`abort` comes first."""
        await self.settled()
        if self._way is not None:
            await self._way.aclose()

    def close(self) -> None:
        """Close the way, unless it is being opened. Never waits."""
        if self._way is not None and not self._way.is_opening:
            self._way.close()  # else it is over with its opening, which nobody wants

    def _open(self, opening: Callable[[], Awaitable[None]]) -> None:
        name = f"asynckv: connect GPUs with {self._link.peer.id}"
        self._openings.own(self._try(opening), name)

    async def _try(self, opening: Callable[[], Awaitable[None]]) -> None:
        if why := await _why_not(opening):
            self._failed()
            if self._link.is_open and not self._has_told:
                self._has_told = True
                logger.info(
                    "payload of the pipe to %s goes through host memory: %s",
                    self._link.peer.id,
                    why,
                )

    async def _ask(self) -> None:
        if not (reason := await self._why_not_shared(self._sharing.ask)):
            return
        if why := await _why_not(self._ask_nccl):
            raise ConfigError(f"{why}; nor by CUDA IPC: {reason}")

    async def _share(self, handshake: Handshake) -> None:
        reason = await self._why_not_shared(partial(self._sharing.answer, handshake))
        if reason and not self._is_asked.is_set():
            # Not the end of it: NCCL may be asked for, and is then soon.
            self._link.call_when_lost(lambda _: self._is_asked.set())
            try:
                async with asyncio.timeout(AGREE_S):
                    await self._is_asked.wait()
            except TimeoutError:
                raise ConfigError(reason) from None

    async def _why_not_shared(self, sharing: Callable[[], Awaitable[None]]) -> str:
        reason = await _why_not(sharing)
        if reason:
            self._sharing.close()
        return reason

    async def _ask_nccl(self) -> None:
        way = await self._make_way()
        # Whenever it accepts the pipe: that is bounded by the link's life.
        await way.ask(self._memory.open, is_patient=True)

    async def _answer(self, channel: DeviceStream, frame: OpenDevices) -> None:
        with channel:
            way = await self._make_way()
            await way.answer(channel, frame.description, self._memory.open)

    async def _make_way(self) -> GpuLink:
        self._way = await GpuLink.make(self._link, self._device, self._digest)
        return self._way


async def _why_not(opening: Callable[[], Awaitable[None]]) -> str:
    """Return why something was not opened; empty if it was. No error is kept."""
    try:
        await opening()
    except (AsyncKVError, OSError, TimeoutError, ValueError) as exc:
        return str(exc) or "no answer in time"
    return ""
