"""How the bytes of parcels leave: by the link's payload, or from GPU to GPU.

What left from GPU to GPU, or is to be read where it lies, may be asked for by the
link's payload, until the peer has verified it. Plain functions; tasks read back what a
GPU has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from asynckv.errors import LocalProtocolError, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.links.own_tasks import OwnTasks
from asynckv.pipes.gpu_sharing import GpuSharing
from asynckv.pipes.gpu_side import GpuSide
from asynckv.pipes.parcels import Parcel
from asynckv.protocol.device_frames import GrantDevices, SentDevices
from asynckv.protocol.frames import Frame
from asynckv.protocol.handshake import DigestMode, strictest
from asynckv.protocol.ipc_frames import PushShared
from asynckv.protocol.payload_frames import Done, Grant
from asynckv.tensors.growth import Growth
from asynckv.tensors.views import bytes_of

__all__ = ("Leaving",)

_NOTHING: Final = memoryview(b"")


class Leaving:
    """The parcels of one pipe that were pushed without their bytes.

    ``failed`` is told, on the loop, why one cannot leave any more.
    """

    def __init__(
        self,
        link: Link,
        send: Callable[[Frame, memoryview], None],
        memory: Growth,
        failed: Callable[[Exception], None],
    ) -> None:
        self.gpus: GpuSide | None = None
        self._link = link
        self._send = send
        self._memory = memory
        self._waiting: dict[int, Parcel] = {}
        self._shown: dict[int, tuple[GpuSharing, int]] = {}
        self._by_gpu: dict[int, Parcel] = {}
        self._reading: dict[int, asyncio.Task[None]] = {}
        self._tasks = OwnTasks(failed)

    def add(self, parcel: Parcel) -> None:
        """It leaves when the peer grants it memory."""
        self._waiting[parcel.transfer] = parcel

    def show(self, parcel: Parcel) -> PushShared | None:
        """Let the peer read it where it lies, if it can: return what it is told.

        It may grant it as well.
        """
        gpus, region = self.gpus, parcel.region
        if gpus is None or region is None or parcel.spec is None:
            return None
        if not gpus.sharing.is_open:
            return None
        number = gpus.sharing.pin(region)
        self._shown[parcel.transfer] = gpus.sharing, number
        parcel.is_sent = True
        return PushShared(parcel.transfer, parcel.spec, region.start, parcel.digest)

    def on_grant(self, frame: Grant) -> None:
        """The peer's memory is ready for a tensor, for the link's payload.

        :raises RemoteProtocolError: it waits for none
        """
        parcel = self._waiting.pop(frame.transfer, None) or self._stop(frame.transfer)
        if parcel is None:
            raise RemoteProtocolError("a Grant for what waits for none")
        parcel.is_sent = False
        if parcel.memory is None:
            self._start(parcel, partial(self._hoist, parcel))
        else:
            self._send_by_link(parcel)

    def on_grant_devices(self, frame: GrantDevices) -> None:
        """The peer's memory of its GPU is ready for a tensor.

        If this side's way is over, the peer will hear of that, and grant it again.

        :raises RemoteProtocolError: it waits for none, there is no way, or it is not
            on this side's GPU
        """
        gpus, transfer = self.gpus, frame.transfer
        way = None if gpus is None else gpus.opening.agreed_way
        parcel = self._waiting.pop(transfer, None)
        is_here = parcel is not None and parcel.memory is None
        if parcel is None or not is_here or gpus is None or way is None:
            raise RemoteProtocolError("a GrantDevices for what waits for none")
        kind = strictest(gpus.digest, frame.kind)
        self._by_gpu[transfer] = parcel

        def sent(_: bytes, error: BaseException | None) -> None:
            if error is None and self._by_gpu.get(transfer) is parcel:
                self._start(parcel, partial(self._tell_sent, gpus, parcel, kind))

        try:
            way.transport.send(transfer, 0, parcel.place(), sent)
        except LocalProtocolError as exc:
            raise RemoteProtocolError("GPUs that are not connected") from exc

    def forget(self, parcel: Parcel) -> None:
        """The peer has verified it."""
        self._waiting.pop(parcel.transfer, None)
        self._by_gpu.pop(parcel.transfer, None)
        self._reading.pop(parcel.transfer, None)
        if (shown := self._shown.pop(parcel.transfer, None)) is not None:
            sharing, number = shown
            sharing.unpin(number)

    def end(self) -> None:
        """Nothing leaves any more. Never waits."""
        self._waiting.clear()
        self._shown.clear()  # the peer may still read it, until it says otherwise
        for transfer in list(self._by_gpu):
            self._stop(transfer)
        self._tasks.cancel()

    async def aclose(self) -> None:
        """Wait until no thread and no GPU reads what was to leave."""
        self.end()
        await self._tasks.wait()

    def _stop(self, transfer: int) -> Parcel | None:
        """Stop what goes from GPU to GPU, if it does; return that."""
        parcel = self._by_gpu.pop(transfer, None)
        if parcel is not None and self.gpus is not None:
            if (way := self.gpus.opening.agreed_way) is not None:
                way.transport.stop(transfer)
            if (task := self._reading.pop(transfer, None)) is not None:
                task.cancel()
        return parcel

    def _start(self, parcel: Parcel, work: Callable[[], Awaitable[None]]) -> None:
        name = f"asynckv: transfer {parcel.transfer} of a pipe"
        self._reading[parcel.transfer] = self._tasks.start(work, name)

    async def _tell_sent(self, gpus: GpuSide, parcel: Parcel, kind: DigestMode) -> None:
        digest = await self._digest(gpus, parcel, kind)
        if self._by_gpu.get(parcel.transfer) is parcel:
            parcel.is_sent = True
            self._send(SentDevices(parcel.transfer, 0, kind, digest), _NOTHING)

    async def _digest(self, gpus: GpuSide, parcel: Parcel, kind: DigestMode) -> bytes:
        if kind == "off":
            return b""
        read = gpus.pool.edges if kind == "edges" else gpus.pool.digest
        (digest,) = await read([parcel.place()])
        return digest

    async def _hoist(self, parcel: Parcel) -> None:
        """Bring what is on the GPU to the host, and send it from there."""
        if self.gpus is None or parcel.spec is None:
            raise TypeError("a parcel that is nowhere")
        await self._memory.reach(parcel.nbytes)
        memory = self._memory.lending.spare(parcel.spec)
        (parcel.digest,) = await self.gpus.pool.copy(
            [parcel.place()], [memory], digest=self._link.digest != "off"
        )
        parcel.memory = memory
        parcel.leave_gpu()
        self._send_by_link(parcel)

    def _send_by_link(self, parcel: Parcel) -> None:
        if parcel.memory is None:
            raise TypeError("a parcel that is nowhere")

        def done(digest: bytes, error: BaseException | None) -> None:
            if error is None:
                parcel.memory, parcel.is_sent = None, True
                self._send(Done(parcel.transfer, 0, digest), _NOTHING)

        view = bytes_of(parcel.memory)
        digest = parcel.digest or None
        self._link.payload.send(parcel.transfer, 0, view, done, digest=digest)
