"""The parts of one transfer on their way into a buffer, from a peer that has them all.

Those for a GPU come from the peer's GPU where a way leads there, else through host
memory. What such a way has lost comes once more through host memory: the peer keeps it
until it has been told that all is in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from asynckv.errors import ChecksumError, GPUFailed, RemoteProtocolError
from asynckv.links.answers import Watchers
from asynckv.links.gpu_link import GpuArrivals, GpuPathLost
from asynckv.links.link import Link
from asynckv.links.requests import LinkStream
from asynckv.protocol.frames import Cancel, Frame
from asynckv.protocol.transfer_frames import (
    Done,
    Grant,
    Riders,
    SentDevices,
    SentShared,
)
from asynckv.shielding import wait_shielded
from asynckv.tensors.arena import Region
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.runs import Memory, fill
from asynckv.tensors.views import bytes_of
from asynckv.transfers.eager import rides
from asynckv.transfers.ipc_route import IpcArrivals
from asynckv.transfers.reception import Reception
from asynckv.types import TensorSpec

__all__ = (
    "ArrivingParts",
    "PartLanding",
    "PartsOnGpu",
    "SentOnGpu",
    "hear_arriving",
    "lift_landed",
    "note_sent",
    "on_gpu",
)


class PartLanding:
    """The way of one part into its region: straight, or by a copy in host memory."""

    def __init__(self, region: Region, spec: TensorSpec, pool: CopyPool) -> None:
        self.spec = spec
        self._region = region
        self._copy = pool.host_empty(spec) if region.is_on_device else None

    @property
    def is_to_be_lifted(self) -> bool:
        """Is what lands here still to be brought to a GPU?"""
        return self._copy is not None

    @property
    def memory(self) -> Memory:
        """Memory of the host, as large as the part."""
        if self._copy is None:
            return self._region.memory()
        return bytes_of(self._copy)

    def fill(self, piece: memoryview) -> None:
        """Let bytes land that have come with a frame: at most 64 KiB. Never waits."""
        fill(self.memory, piece)


async def lift_landed(
    landings: Sequence[PartLanding], digests: Sequence[bytes], pool: CopyPool
) -> None:
    """Bring to the GPU what has landed for it, whole; nothing is done to the others.

    ``digests`` are those of what has come, empty where nobody digests. A cancelled call
    ends when the GPU is done.

    :raises ChecksumError: it has changed in this process's memory
    """
    lifted = [i for i, landing in enumerate(landings) if landing.is_to_be_lifted]
    if not lifted:
        return
    copies = [x._copy for i in lifted if (x := landings[i])._copy is not None]
    places = [landings[i]._region.place(landings[i].spec) for i in lifted]
    copying = pool.copy(copies, places)
    del copies, places  # an error's traceback would keep the memory in use
    for i, found in zip(lifted, await copying, strict=True):
        if digests[i] and found != digests[i]:
            raise ChecksumError("what came changed on its way to the GPU")


def on_gpu(region: Region, spec: TensorSpec) -> DeviceMemory:
    """Return the memory of a GPU that a region is in; whoever has it keeps it."""
    place = region.place(spec)
    if not isinstance(place, DeviceMemory):
        raise TypeError("a region of a GPU lies elsewhere")
    return place


PartsOnGpu: TypeAlias = GpuArrivals | IpcArrivals
"""By NCCL, or read by CUDA IPC where the peer has them."""

SentOnGpu: TypeAlias = SentDevices | SentShared


def note_sent(frame: SentOnGpu, arrivals: PartsOnGpu, reception: Reception) -> None:
    """The peer has sent a part, or says where it lies.

    :raises RemoteProtocolError: it makes no sense, or was granted otherwise
    """
    match frame, arrivals:
        case SentDevices(), GpuArrivals():
            arrivals.sent(frame)
            reception.on_done(Done(frame.transfer, frame.part, frame.digest))
        case SentShared(), IpcArrivals():
            arrivals.sent(frame)
        case _:
            name = type(frame).__name__
            raise RemoteProtocolError(f"a {name} for what was granted otherwise")


class ArrivingParts:
    """All parts of a transfer, each with the region that it belongs in.

    ``pool`` copies them. ``by_gpu`` returns a way by which they can come to this side's
    GPU, if there is one. ``landed`` is called with the number of each that is there,
    and its digest.
    """

    def __init__(
        self,
        stream: LinkStream,
        transfer: int,
        parts: Sequence[tuple[Region, TensorSpec]],
        pool: CopyPool,
        by_gpu: Callable[[], PartsOnGpu | None] | None,
        landed: Callable[[int, bytes], None],
    ) -> None:
        self._stream = stream
        self._transfer = transfer
        self._parts = parts
        self._pool = pool
        self._find_gpu_way = by_gpu
        self._landed = landed
        self._landings: dict[int, PartLanding] = {}
        self._to_lift: dict[int, bytes] = {}
        self._watchers = Watchers()
        self._was_by_gpu = False
        self._coming: list[_Coming] = []
        self._by_gpu: tuple[_Coming, PartsOnGpu] | None = None
        self._by_host: _Coming  # from the moment on that anything is granted

    async def arrive(self) -> None:
        """Grant the transfer, and wait until every part is verified, and in.

        However this ends, :meth:`quiesce` is to follow.

        :raises ChecksumError: other bytes came than were sent
        :raises GPUFailed: the GPU failed, or may write for ever where they belong
        """
        rest: Sequence[int] = range(len(self._parts))
        if self._find_gpu_way is not None and self._may_come_by_gpu():
            arrivals = self._find_gpu_way()
            if arrivals is not None:
                rest = await self._come_by_gpu(arrivals)
        if rest:
            self._by_host = self._receive(rest)
            self._stream.send(Grant(self._transfer))
        await self._all_in(self._by_host)

    def on_frame(self, frame: Done | Riders | SentOnGpu, body: bytes) -> None:
        """The peer has sent some.

        :raises RemoteProtocolError: it makes no sense
        """
        if isinstance(frame, Done | Riders):
            self._by_host.reception.on_parts(frame, body)
        elif not self._was_by_gpu:
            raise RemoteProtocolError("a part of a GPU that was not asked for")
        elif self._by_gpu is not None:  # else it was said before the way was lost
            coming, arrivals = self._by_gpu
            note_sent(frame, arrivals, coming.reception)

    async def quiesce(self) -> None:
        """Wait until nothing touches the regions (at most 1 s)."""
        for coming in self._coming:
            coming.reception.stop()
        quiet = [coming.reception.quiesce() for coming in self._coming]
        # All of them, however often the wait is cancelled: the peer is told then.
        await wait_shielded(asyncio.gather(*quiet, return_exceptions=True))

    def _may_come_by_gpu(self) -> bool:
        """Is all on this side's GPU that does not ride?"""
        regions = [region for region, _ in self._parts if not rides(region.nbytes)]
        return bool(regions) and all(region.is_on_device for region in regions)

    async def _come_by_gpu(self, arrivals: PartsOnGpu) -> Sequence[int]:
        """Wait for all parts; return those that are to come through host memory."""
        small = [i for i, (region, _) in enumerate(self._parts) if rides(region.nbytes)]
        self._by_host = self._receive(small)
        rest = [i for i in range(len(self._parts)) if i not in self._landings]
        places = {i: on_gpu(*self._parts[i]) for i in rest}
        self._was_by_gpu = True
        coming = self._come(places, self._landed, arrivals)
        self._by_gpu = coming, arrivals
        del places  # an error's traceback would keep the memory in use
        self._stream.send(arrivals.grant(self._transfer))
        try:
            await coming.whole
        except GpuPathLost as exc:
            self._by_gpu = None
            await coming.reception.quiesce()
            if not exc.is_quiet:
                raise GPUFailed(exc.message) from exc
        else:
            rest = []
        await self._all_in(self._by_host)  # it rides once, however the others come
        return rest

    def _receive(self, indexes: Sequence[int]) -> _Coming:
        """Let parts land in host memory: straight, or on their way to the GPU."""
        for index in indexes:
            self._landings[index] = PartLanding(*self._parts[index], self._pool)
        places = {index: self._landings[index].memory for index in indexes}
        return self._come(places, self._has_come, None)

    def _come(
        self,
        places: Mapping[int, Memory | DeviceMemory],
        verified: Callable[[int, bytes], None],
        arrivals: PartsOnGpu | None,
    ) -> _Coming:
        targets = [places.get(index) for index in range(len(self._parts))]
        link = self._stream.link
        coming = _Coming(link, self._transfer, targets, verified, arrivals)
        self._coming.append(coming)
        return coming

    def _has_come(self, index: int, digest: bytes) -> None:
        if self._landings[index].is_to_be_lifted:
            self._to_lift[index] = digest
            self._watchers.wake()
        else:
            del self._landings[index]
            self._landed(index, digest)

    async def _all_in(self, coming: _Coming) -> None:
        """Wait until all that comes by one way is verified, and in.

        What has come is brought to its GPU while the rest is on the wire.
        """
        coming.whole.add_done_callback(lambda _: self._watchers.wake())
        while True:
            if is_whole := coming.whole.done():
                coming.whole.result()  # what fails one part fails all
            if self._to_lift:
                await self._lift()
            elif is_whole:
                return
            else:
                await self._watchers.next_change(self._stream.link.loop)

    async def _lift(self) -> None:
        """Bring what has come to the GPU that it is to be on, and tell of it then."""
        digests, self._to_lift = self._to_lift, {}
        landings = [self._landings.pop(index) for index in digests]
        lifting = lift_landed(landings, [*digests.values()], self._pool)
        del landings  # what landed is let go as soon as it was lifted
        await lifting
        for index, digest in digests.items():
            self._landed(index, digest)


class _Coming:
    """Parts that come by one way. ``whole`` is done when all of them are verified."""

    def __init__(
        self,
        link: Link,
        transfer: int,
        targets: Sequence[Memory | DeviceMemory | None],
        verified: Callable[[int, bytes], None],
        arrivals: PartsOnGpu | None,
    ) -> None:
        self.whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._verified = verified
        self._left = sum(target is not None for target in targets)
        self.reception = Reception(
            *(link, transfer, targets, self),
            has_riders=True,
            payload=arrivals,
            progress=None if arrivals is None else arrivals.progress,
            is_compared=arrivals is not None and arrivals.compares,
        )
        self.reception.begin()
        if not self._left:
            self.whole.set_result(None)

    def part_verified(self, index: int, digest: bytes) -> None:
        self._verified(index, digest)
        self._left -= 1
        if not self._left and not self.whole.done():
            self.whole.set_result(None)

    def reception_failed(self, error: Exception) -> None:
        if not self.whole.done():
            self.whole.set_exception(error)
            self.whole.exception()  # the request may have been cancelled meanwhile


def hear_arriving(
    request: asyncio.Task[None],
    parts: ArrivingParts | None,
    frame: Frame,
    body: bytes,
) -> None:
    """The peer says something of what it puts: cancel the request, or tell its parts.

    :raises RemoteProtocolError: nothing of it was granted yet, or it is something else
    """
    match frame:
        case Cancel():
            request.cancel()
        case Done() | Riders() | SentDevices() | SentShared() if parts is not None:
            parts.on_frame(frame, body)
        case _:
            raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")
