"""The memory of one GPU that both sides of a pipe, two processes, read where it lies.

By CUDA IPC, each side opens the other's allocation and copies out of it, on the GPU. A
tensor stays where its sender has it until the receiver has flushed it, or has closed
the memory: a socket of its own says so, also of who was killed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import torch

from asynckv.errors import (
    AsyncKVError,
    ChecksumError,
    ConfigError,
    PeerLost,
)
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.link import Link
from asynckv.links.options import new_identity
from asynckv.pipes.sharing_stream import SharingStream
from asynckv.protocol.handshake import DigestMode, strictest
from asynckv.protocol.ipc_frames import Exported, Imported, OpenIpc, PushShared
from asynckv.sharing.exports import check_same_host, open_export
from asynckv.sharing.imports import PeerMemory
from asynckv.sharing.owner import LEAST_NBYTES, MapHolder, Sharing
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.device_regions import DeviceRegion
from asynckv.tensors.growth import Growth
from asynckv.tensors.on_gpu import KVOnGpu

__all__ = ("AGREE_S", "GpuSharing")

logger = logging.getLogger(__name__)

AGREE_S: Final = 10.0
_TELL_S: Final = 0.1


class GpuSharing:
    """What one side of a pipe shows of ``growth``, and reads of the peer's.

    ``uuid`` names the GPU. ``digest`` is what this side wants to be compared; once it
    is open, what both do.
    """

    def __init__(
        self,
        link: Link,
        uuid: str,
        growth: Growth,
        pool: DeviceCopyPool,
        digest: DigestMode,
    ) -> None:
        self.digest: DigestMode = digest
        self._wanted: DigestMode = digest
        self._link = link
        self._uuid = uuid
        self._growth = growth
        self._pool = pool
        self._sharing = Sharing(growth.arena, self._look, growth.drop_soon)
        self._holder: MapHolder | None = None
        self.peer_memory = PeerMemory(self._lost)
        self._has_begun = False
        self._is_over = False

    @property
    def is_open(self) -> bool:
        """Whether the peer reads here what it is shown, and this side there."""
        return self._has_begun and not self._is_over

    def why_not(self, uuid: str) -> str:
        """Return why a peer that uses that GPU is shown nothing; empty if it may be."""
        if uuid != self._uuid:
            return "both sides have GPUs of their own"
        if not self._link.may_map or not has_fd_sockets():
            return "no memory is shared with it"
        try:
            check_same_host(self._link, new_identity().boot_id)
        except ValueError as exc:
            return str(exc)
        return ""

    async def ask(self) -> str:
        """Share with the peer, if it has the same GPU; return why not if it has not.

        Waits until the peer has accepted the pipe, and 10 s from then on. Once that was
        cancelled, or has failed, :meth:`close` is to follow.

        :raises AsyncKVError: it is the same GPU, and yet its memory cannot be shared
        :raises TimeoutError: the peer, or the GPU, did not answer
        :raises OSError: the process may have no more files
        """
        if reason := self.why_not(self._uuid):
            return reason
        stream = SharingStream(answers=False)
        stream.use(self._link.open_stream(stream, OpenIpc(self._uuid)))
        try:
            try:
                exported = await stream.exported()
            except PeerLost:
                raise
            except AsyncKVError as exc:
                return exc.message
            async with asyncio.timeout(AGREE_S):
                await self._growth.open()
                stream.send(Imported(await self._open(exported)))
                stream.send(self._show())
                self._verify(await stream.found())
            self._begin()
        except BaseException as exc:
            stream.leave(exc)
            raise
        return ""

    async def answer(self, stream: SharingStream) -> None:
        """Share with the peer that has asked for the same GPU; as :meth:`ask`.

        :raises AsyncKVError: the memory cannot be shared
        :raises TimeoutError: the peer, or the GPU, did not answer
        :raises OSError: the process may have no more files
        """
        try:
            async with asyncio.timeout(AGREE_S):
                await self._growth.open()
                stream.send(self._show())
                self._verify(await stream.found())
                nonce = await self._open(await stream.exported())
            # From here on the peer may say where tensors lie, and so may this side.
            self._begin()
            stream.send(Imported(nonce))
            stream.accept()
        except BaseException as exc:
            stream.leave(exc)
            raise

    def pin(self, region: DeviceRegion) -> int:
        """Keep what the peer is about to read; return the number for :meth:`unpin`.

        The peer's end, or that it has closed the memory, ends it too.
        """
        if self._holder is None:
            raise RuntimeError("nobody reads the memory")
        return self._holder.pin([region]).number

    def unpin(self, number: int) -> None:
        """The peer has read it. Never waits."""
        if self._holder is not None:
            self._holder.unpin(number)

    async def copy(
        self, source: torch.Tensor | KVOnGpu | DeviceMemory, target: DeviceMemory
    ) -> bytes:
        """Copy one tensor; return the digest of what has landed, as both compare it.

        A cancelled call ends when nothing is at either place.

        :raises GPUFailed: the GPU failed
        """
        kind, pool = self.digest, self._pool
        (digest,) = await pool.copy([source], [target], digest=kind == "full")
        if kind == "edges":
            (digest,) = await pool.edges([target])
        return digest

    def read(
        self,
        shown: PushShared,
        target: DeviceMemory,
        done: Callable[[Exception | None], None],
    ) -> asyncio.Task[None]:
        """Copy what the peer has shown, as :meth:`PeerMemory.read`. Never waits."""

        async def copy(source: DeviceMemory, target: DeviceMemory) -> None:
            if await self.copy(source, target) != shown.digest:
                raise ChecksumError("a tensor arrived with other bytes than were sent")

        return self.peer_memory.read(shown.offset, target, copy, done)

    def close(self) -> None:
        """Show nothing more, and close the peer's memory when nothing reads it.

        Never waits.
        """
        if not self._is_over:
            self._is_over = True
            self._sharing.close()
            self.peer_memory.close()

    async def aclose(self) -> None:
        """As :meth:`close`; wait until both sides have closed, about 4 s at most.

        What the peer has not closed then, it keeps.
        """
        self.close()
        await self.peer_memory.aclose()
        await self._sharing.aclose()

    async def _open(self, exported: Exported) -> bytes:
        pages = self._growth.device_pages
        if pages is None or not pages.is_open:
            raise ConfigError("this side has no memory of a GPU")
        export, nonce = await open_export(exported, pages.allocation)
        self.peer_memory.put(export)
        self.digest = strictest(self._wanted, exported.digest)
        return nonce

    def _show(self) -> Exported:
        found = self._sharing.export(self._link, self._uuid, self._wanted)
        if found is None:
            raise ConfigError("this side has no memory of that GPU to show")
        self._holder, exported = found
        if exported.nbytes < LEAST_NBYTES:
            raise ConfigError("this side has too little memory of that GPU to show")
        return exported

    def _verify(self, found: bytes) -> None:
        if self._holder is None or not self._holder.verify(found):
            raise ConfigError("that is not what the memory holds")

    def _begin(self) -> None:
        if self._is_over:
            raise PeerLost("the pipe was closed meanwhile")
        self._has_begun = True
        self._link.use_ipc()
        self._link.call_when_lost(lambda _: self.close())
        peer = self._link.peer.id
        logger.info("payload of the pipe to %s goes by CUDA IPC", peer)

    def _look(self) -> None:
        """The peer has said something, or is gone."""
        if self._holder is not None and not self._holder.is_connected:
            self._lost("the peer has closed the memory")

    def _lost(self, reason: object) -> None:
        was_open = self.is_open
        self.close()
        if was_open and self._link.is_open:
            self._link.use_lanes()
            # A peer that is gone has closed both: that is no news then.
            loop = asyncio.get_running_loop()
            loop.call_later(_TELL_S, _tell_loss, self._link, str(reason))


def _tell_loss(link: Link, reason: str) -> None:
    if link.is_open:
        logger.warning(
            "payload of the pipe to %s goes through host memory from here on: %s",
            link.peer.id,
            reason,
        )
