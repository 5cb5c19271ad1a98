"""Where the tensors of a pipe land: memory of this side, and what the peer is told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

from asynckv.errors import RemoteProtocolError
from asynckv.links.link import Link
from asynckv.pipes.arrivals import Arrival
from asynckv.pipes.gpu_side import GpuSide
from asynckv.protocol.device_frames import SentDevices
from asynckv.protocol.frames import Frame
from asynckv.protocol.ipc_frames import PushShared
from asynckv.protocol.payload_frames import Done, Grant
from asynckv.tensors.growth import Growth
from asynckv.tensors.views import bytes_of
from asynckv.transfers.reception import Reception

__all__ = ("Granting",)

_NOTHING: Final = memoryview(b"")


class Granting:
    """Grants what the peer has announced memory to land in: of a GPU, or of the host.

    What finds none comes when :meth:`grant` is called for it again. ``granted`` is told
    when what has waited for a slab was granted.
    """

    def __init__(
        self,
        link: Link,
        send: Callable[[Frame, memoryview], None],
        max_bytes: int,
        granted: Callable[[], None],
    ) -> None:
        self.gpus: GpuSide | None = None
        self._link, self._send, self._granted = link, send, granted
        self._max_bytes = max_bytes
        self._memory = Growth(max_bytes, self._grant_waiting)
        self._landing: dict[int, Arrival] = {}
        self._to_grant: dict[Arrival, None] = {}
        """What waits for a slab, the first one first."""

    def expect(self, arrival: Arrival) -> None:
        """It was announced: let it land, unless it is above the bound. Never waits."""
        self._link.payload.announce(arrival.transfer)
        if arrival.nbytes <= self._max_bytes:
            self.try_to_grant(arrival)

    def try_to_grant(self, arrival: Arrival) -> None:
        """As :meth:`grant`; without memory it comes when it is waited for."""
        with contextlib.suppress(MemoryError):
            self.grant(arrival)

    def grant(self, arrival: Arrival) -> None:
        """Let it land, unless it does already. Never waits.

        :raises MemoryError: there is none for a tensor above the bound
        """
        if arrival.spec is None or arrival.is_landing or self._lands_on_gpu(arrival):
            return
        if self._memory.awaits(arrival.nbytes):
            self._to_grant[arrival] = None
            return
        try:
            arrival.tensor = self._memory.lending.spare(arrival.spec)
        except RuntimeError as exc:
            raise MemoryError(f"none for a tensor of {arrival.nbytes} bytes") from exc
        target = bytes_of(arrival.tensor)
        arrival.reception = Reception(self._link, arrival.transfer, [target], arrival)
        self._landing[arrival.transfer] = arrival
        arrival.reception.begin()
        self._send(Grant(arrival.transfer), _NOTHING)

    def check_shown(self, frame: PushShared) -> None:
        """Raise if the peer shows what is not within its memory."""
        if self.gpus is not None:
            nbytes = frame.spec.nbytes
            self.gpus.sharing.peer_memory.check(frame.offset, nbytes)

    def on_done(self, frame: Done) -> None:
        """The peer has sent a tensor's last byte."""
        arrival = self._landing.get(frame.transfer)
        if arrival is None or arrival.reception is None:
            raise RemoteProtocolError("a Done for what was never granted")
        arrival.reception.on_done(frame)

    def on_sent_devices(self, frame: SentDevices) -> None:
        """The peer has sent a tensor's last byte from its GPU to this one's."""
        arrival = self._landing.get(frame.transfer)
        if arrival is None:
            raise RemoteProtocolError("a tensor of a GPU that was never granted")
        arrival.on_sent_devices(frame)

    def landed(self, arrival: Arrival) -> None:
        """It is whole."""
        arrival.reception = None
        self._landing.pop(arrival.transfer, None)

    def forget(self, arrival: Arrival) -> None:
        """Nobody wants it any more, and it lands no further. Never waits."""
        self._to_grant.pop(arrival, None)
        if arrival.reception is not None:
            arrival.reception.stop()
        arrival.let_go()
        self._landing.pop(arrival.transfer, None)

    async def aclose(self) -> None:
        """Give idle memory back. Bounded; what was taken keeps its own."""
        await self._memory.aclose()

    def abort(self) -> None:
        """As :meth:`aclose`, but never waits."""
        self._memory.close()

    def _lands_on_gpu(self, arrival: Arrival) -> bool:
        """Let it land in memory of the GPU, if that can be."""
        if self.gpus is None:
            return False
        if arrival.read_on_gpu(self.gpus):
            return True
        if (granted := arrival.land_on_gpu(self._link, self.gpus)) is None:
            return False
        self._landing[arrival.transfer] = arrival
        self._send(granted, _NOTHING)
        return True

    def _grant_waiting(self) -> None:
        waiting, self._to_grant = self._to_grant, {}
        for arrival in waiting:
            self.try_to_grant(arrival)
        if waiting:
            self._granted()
