"""One link's payload from GPU to GPU by NCCL, as long as that works.

What fails here ends this way alone: the link goes on, and payload goes through the
memory of the hosts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

from asynckv.errors import GPUFailed, PeerLost
from asynckv.links.link import Link
from asynckv.links.progress import Progress
from asynckv.protocol.handshake import DigestMode
from asynckv.shielding import wait_shielded
from asynckv.tensors.devices import Device
from asynckv.transports.nccl.settings import NcclSettings
from asynckv.transports.nccl.transport import NcclTransport
from asynckv.transports.nccl.workers import WorkerUse, worker_of

__all__ = ("GpuLink", "GpuPathLost")

logger = logging.getLogger(__name__)

_OPEN_S: Final = 10.0
_SETTINGS: Final = NcclSettings(open_s=_OPEN_S)


class GpuPathLost(GPUFailed):
    """Payload does not go from GPU to GPU any more, for that link.

    With ``is_quiet`` nothing of what was under way touches memory any more.
    """

    def __init__(self, error: BaseException, *, is_quiet: bool) -> None:
        super().__init__(f"the way from GPU to GPU was lost: {error}")
        self.is_quiet = is_quiet


class GpuLink:
    """The NCCL transport of one link, on this side. Made by :meth:`make`.

    ``digest`` is what this side wants to be compared of what came.
    """

    def __init__(self, link: Link, use: WorkerUse, digest: DigestMode) -> None:
        loop = asyncio.get_running_loop()
        self.link = link
        self.digest: DigestMode = digest
        self.is_open = False
        """Whether deliveries may go this way now."""
        self.transport = NcclTransport(
            *(use.worker, False, loop, self._on_lost, _SETTINGS)
        )
        self.progress = Progress(self.transport, self._stalled)
        self._use = use
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def make(cls, link: Link, device: Device, digest: DigestMode) -> GpuLink:
        """Return one that is not open yet.

        :raises GPUUnavailable: CuPy, NCCL, a driver or that GPU is missing
        :raises GPUFailed: the GPU's worker was given up
        """
        return cls(link, await worker_of(device), digest)

    async def open(self, opening: Coroutine[Any, Any, object]) -> None:
        """Wait for the transport's opening, at most 10 s.

        If that fails, or is cancelled, it is over.

        :raises Exception: why it is not open
        """
        try:
            async with asyncio.timeout(_OPEN_S):
                await opening
        except BaseException:
            self.close()
            raise
        self.is_open = True
        self.link.use_nccl()
        self.link.call_when_lost(self._link_lost)
        logger.info("payload of the link to %s goes by NCCL", self.link.peer.id)

    def lost(self, error: BaseException) -> GpuPathLost:
        """Return what is raised of a transfer that ``error`` has ended."""
        return GpuPathLost(error, is_quiet=self._use.worker.error is None)

    def close(self) -> asyncio.Task[None]:
        """Move nothing more. Never waits; what is returned waits for the GPU."""
        if self._closing is None:
            self.is_open = False
            self.progress.stop()
            loop = asyncio.get_running_loop()
            self._closing = loop.create_task(self._close(), name="asynckv: close NCCL")
        return self._closing

    async def aclose(self) -> None:
        """Close it, and wait until the GPU has let go, about 1 s at most. Shielded."""
        await wait_shielded(self.close())

    async def _close(self) -> None:
        self.transport.abort()
        await self.transport.aclose()
        if self.transport.is_quiet:
            self._use.end()  # else its worker is left to whoever comes: it has work

    def _link_lost(self, _: PeerLost) -> None:
        self.close()

    def _stalled(self, error: Exception) -> None:
        self._on_lost(error)

    def _on_lost(self, error: Exception) -> None:
        was_open = self.is_open
        self.close()
        if was_open and self.link.is_open:
            self.link.use_lanes()
            logger.warning(
                "payload of the link to %s goes through host memory from here on: %s",
                self.link.peer.id,
                error,
            )
