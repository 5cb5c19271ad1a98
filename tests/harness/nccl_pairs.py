"""Both ends of an NCCL transport, in one process, on GPUs that are not there."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import ClassVar

from asynckv.abc import PayloadTransport
from asynckv.devices.cuda import DeviceMemory
from asynckv.protocol.transfer_frames import DeviceFrame
from asynckv.protocol.wire import digest_of
from asynckv.tensors.runs import Memory
from asynckv.testing.blocked import until
from asynckv.transports.nccl.directions import NcclSettings
from asynckv.transports.nccl.transport import NcclTransport
from asynckv.transports.nccl.worker import DeviceWorker
from asynckv.transports.parts import DoneCallback
from asynckv.waits.waiting import wait_shielded
from harness.fake_gpus import FakeGpus, FakeProcess
from harness.fake_gpus.cuda import FakeCuda

__all__ = ("HostMemory", "LoopChannel", "NcclPair", "loop_channels", "open_nccl_pair")


class LoopChannel:
    """Fits :class:`~asynckv.transports.nccl.transport.DeviceChannel` within a loop.

    ``holds`` keeps back what the other side says; ``said`` is all that this one did.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.other: LoopChannel
        self.said: list[DeviceFrame] = []
        self.holds = False
        self._loop = loop
        self._came: collections.deque[DeviceFrame] = collections.deque()
        self._receive: Callable[[DeviceFrame], None] | None = None
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
        self._receive, self._lost = hear, lost
        self._loop.call_soon(self.pass_on)

    def detach(self) -> None:
        self._receive = self._lost = None

    def pass_on(self) -> None:
        """Hand on what came, unless it is kept back."""
        while self._came and self._receive is not None and not self.holds:
            self._receive(self._came.popleft())

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


class HostMemory(PayloadTransport):
    """An NCCL transport for who has memory of the host: it is the GPU's meanwhile.

    It digests what was moved, so that it keeps the contract of all transports.
    """

    name: ClassVar[str] = "nccl"

    def __init__(
        self, inner: NcclTransport, cuda: FakeCuda, device: int, *, digest: bool
    ) -> None:
        self.inner = inner
        self._cuda = cuda
        self._device = device
        self._digest = digest
        self._adopted: collections.defaultdict[int, list[DeviceMemory]]
        self._adopted = collections.defaultdict(list)

    def describe(self) -> bytes:
        return self.inner.describe()

    async def open(self, peer_description: bytes, side_channel: object) -> None:
        await self.inner.open(peer_description, side_channel)

    def send(
        self,
        transfer: int,
        part: int,
        source: Memory,
        done: DoneCallback,
        *,
        digest: bytes | None = None,
    ) -> None:
        memory, tell = self._adopt(transfer, source, done, digest)
        self.inner.send(transfer, part, memory, tell)

    def receive(
        self, transfer: int, part: int, target: Memory, done: DoneCallback
    ) -> None:
        memory, tell = self._adopt(transfer, target, done, None)
        self.inner.receive(transfer, part, memory, tell)

    def announce(self, transfer: int) -> None:
        self.inner.announce(transfer)

    def landed_bytes(self, transfer: int) -> int:
        return self.inner.landed_bytes(transfer)

    def stop(self, transfer: int) -> None:
        self.inner.stop(transfer)

    async def quiesce(self, transfer: int) -> None:
        try:
            await self.inner.quiesce(transfer)
        finally:
            for memory in list(self._adopted[transfer]):
                self._disown(transfer, memory)

    async def aclose(self) -> None:
        await self.inner.aclose()

    def abort(self) -> None:
        self.inner.abort()

    def _adopt(
        self, transfer: int, memory: Memory, done: DoneCallback, known: bytes | None
    ) -> tuple[DeviceMemory, DoneCallback]:
        if not isinstance(memory, memoryview):
            raise TypeError("memory that lies in several places")
        adopted = DeviceMemory(0, 0, self._device)
        if memory.nbytes:
            adopted = self._cuda.adopt(memory, self._device)
            self._adopted[transfer].append(adopted)

        def tell(_: bytes, error: BaseException | None) -> None:
            self._disown(transfer, adopted)
            digest = b""
            if self._digest and error is None:
                digest = digest_of(memory) if known is None else known
            done(digest, error)

        return adopted, tell

    def _disown(self, transfer: int, memory: DeviceMemory) -> None:
        if memory in self._adopted[transfer]:
            self._adopted[transfer].remove(memory)
            self._cuda.disown(memory)


class NcclPair:
    """Two processes with a GPU each, their workers, channels and transports."""

    def __init__(
        self,
        gpus: FakeGpus,
        near_lost: Callable[[Exception], None],
        far_lost: Callable[[Exception], None],
        *,
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
            NcclTransport(worker, loop, _both(lost.append, tell), settings)
            for worker, lost, tell in zip(
                self.workers, self.lost, (near_lost, far_lost), strict=True
            )
        ]
        self.near, self.far = ends

    def memory(self, side: int, content: bytes) -> DeviceMemory:
        """Allocate memory of one side's GPU that holds ``content``."""
        cuda = self.processes[side].cuda
        cuda.use_device(side)
        memory = cuda.malloc(len(content))
        cuda.view(memory)[:] = list(content)
        return memory

    def content(self, side: int, memory: DeviceMemory) -> bytes:
        """Look at what is there now."""
        return self.processes[side].cuda.view(memory).tobytes()

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
) -> AsyncIterator[tuple[HostMemory, HostMemory]]:
    """Open a pair on fake GPUs, and look for faults when it is left.

    :raises AssertionError: somebody did what real GPUs punish
    """
    gpus = FakeGpus(2, max_delay=max_delay)
    pair = NcclPair(gpus, near_lost, far_lost, settings=settings)
    cudas = [process.cuda for process in pair.processes]
    try:
        await pair.open()
        near = HostMemory(pair.near, cudas[0], 0, digest=digest)
        yield near, HostMemory(pair.far, cudas[1], 1, digest=digest)
    finally:
        try:
            await pair.aclose()
        finally:
            if gpus.faults:
                raise AssertionError(f"faults: {gpus.faults}")
