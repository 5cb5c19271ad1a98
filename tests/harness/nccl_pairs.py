"""Both ends of an NCCL transport, in one process, on GPUs that are not there."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable

from asynckv.protocol.device_frames import DeviceFrame
from asynckv.shielding import wait_shielded
from asynckv.testing.blocked import until
from asynckv.transports.nccl.settings import NcclSettings
from asynckv.transports.nccl.transport import NcclTransport
from asynckv.transports.nccl.worker import DeviceWorker
from harness.fake_gpus import FakeGpus, FakeProcess

__all__ = ("LoopChannel", "NcclPair", "loop_channels", "open_nccl_pair")


class LoopChannel:
    """Fits :class:`~asynckv.transports.nccl.channel.DeviceChannel` within a loop.

    ``holds`` keeps back what the other side says; ``said`` is all that this one did.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.other: LoopChannel
        self.said: list[DeviceFrame] = []
        self.holds = False
        self._loop = loop
        self._came: collections.deque[DeviceFrame] = collections.deque()
        self._hear: Callable[[DeviceFrame], None] | None = None
        self._lost: Callable[[Exception], None] | None = None

    def send(self, frame: DeviceFrame) -> None:
        self.said.append(frame)
        self.other._came.append(frame)
        self._loop.call_soon(self.other.pass_on)

    def attach(
        self,
        hear: Callable[[DeviceFrame], None],
        lost: Callable[[Exception], None],
    ) -> None:
        self._hear, self._lost = hear, lost
        self._loop.call_soon(self.pass_on)

    def detach(self) -> None:
        self._hear = self._lost = None

    def pass_on(self) -> None:
        """Hand on what came, unless it is kept back."""
        while self._came and self._hear is not None and not self.holds:
            self._hear(self._came.popleft())

    def lose(self, error: Exception) -> None:
        """The control link is gone, on this side."""
        if self._lost is not None:
            self._lost(error)


def loop_channels() -> tuple[LoopChannel, LoopChannel]:
    """Return two that hear each other, on the running loop."""
    loop = asyncio.get_running_loop()
    near, far = LoopChannel(loop), LoopChannel(loop)
    near.other, far.other = far, near
    return near, far


class NcclPair:
    """Two processes with a GPU each, their workers, channels and transports."""

    def __init__(
        self,
        gpus: FakeGpus,
        near_lost: Callable[[Exception], None],
        far_lost: Callable[[Exception], None],
        *,
        digest: bool = True,
        settings: NcclSettings | None = None,
        stuck_s: float = 60.0,
        abort_grace_s: float = 5.0,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.gpus = gpus
        self.processes: list[FakeProcess] = [gpus.process() for _ in range(2)]
        self.workers = [
            DeviceWorker(
                process.cuda,
                process.nccl,
                device,
                stuck_s=stuck_s,
                abort_grace_s=abort_grace_s,
            )
            for device, process in enumerate(self.processes)
        ]
        self.channels = loop_channels()
        self.lost: tuple[list[Exception], list[Exception]] = ([], [])
        """Why each end was lost, near and far."""
        ends = [
            NcclTransport(worker, digest, loop, _both(lost.append, tell), settings)
            for worker, lost, tell in zip(
                self.workers, self.lost, (near_lost, far_lost), strict=True
            )
        ]
        self.near, self.far = ends

    async def open(self) -> None:
        """Open both ends, the near one in the calling task."""
        near, far = self.near, self.far
        async with asyncio.TaskGroup() as group:
            group.create_task(far.open(near.describe(), self.channels[1]))
            await near.open(far.describe(), self.channels[0])

    async def aclose(self) -> None:
        """Close both ends, end both workers, and let go of threads that are stuck.

        Cancelled, it does all of that too.
        """
        try:
            await self.near.aclose()
        finally:
            try:
                await self.far.aclose()
            finally:
                ending = asyncio.create_task(self._end_workers())
                await wait_shielded(ending)
                ending.result()

    async def _end_workers(self) -> None:
        for worker in self.workers:
            worker.stop()
        with contextlib.suppress(TimeoutError):
            await until(lambda: not self._alive(), timeout_s=1)
        self.gpus.close()
        await until(lambda: not self._alive())

    def _alive(self) -> bool:
        return any(worker.is_alive for worker in self.workers)


def _both(
    one: Callable[[Exception], None], other: Callable[[Exception], None]
) -> Callable[[Exception], None]:
    def call(error: Exception) -> None:
        one(error)
        other(error)

    return call


@contextlib.asynccontextmanager
async def open_nccl_pair(
    near_lost: Callable[[Exception], None],
    far_lost: Callable[[Exception], None],
    *,
    digest: bool = True,
    max_delay: int = 0,
    settings: NcclSettings | None = None,
) -> AsyncIterator[tuple[NcclTransport, NcclTransport]]:
    """Open a pair on fake GPUs, and look for faults when it is left.

    :raises AssertionError: somebody did what real GPUs punish
    """
    gpus = FakeGpus(2, max_delay=max_delay)
    pair = NcclPair(gpus, near_lost, far_lost, digest=digest, settings=settings)
    try:
        await pair.open()
        yield pair.near, pair.far
    finally:
        try:
            await pair.aclose()
        finally:
            if gpus.faults:
                raise AssertionError(f"faults: {gpus.faults}")
