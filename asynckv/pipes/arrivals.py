"""Tensors that come through a pipe, and the memory that each of them comes to.

A large one comes as a transfer of its own: to memory of a GPU by a route, or of the
host, where the peer shows it or by the link.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Final, Generic, TypeVar

import msgspec
import torch

from asynckv.devices.arena import DeviceRegion
from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.growth import Growth
from asynckv.errors import ChecksumError, GPUFailed, PeerLost, RemoteProtocolError
from asynckv.links.link import LinkStream
from asynckv.pipes.gpu_side import GpuSide
from asynckv.pipes.shared_memory import MapSharing
from asynckv.protocol.frames import Push
from asynckv.protocol.transfer_frames import Sent
from asynckv.protocol.values import Place
from asynckv.tensors.runs import Memory
from asynckv.tensors.views import bytes_of
from asynckv.transfers.incoming import Incoming, Route, receive_frame
from asynckv.transfers.targets import Target, device_memory
from asynckv.types import TensorSpec

__all__ = ("Arrival", "Grants", "ReadAhead", "SmallArrival")


class SmallArrival(msgspec.Struct, eq=False):
    """One small tensor, or None, that has come whole: its bytes."""

    spec: TensorSpec | None
    body: bytes
    nbytes: int
    is_verified: ClassVar = True
    region: ClassVar = None

    def release(self) -> None:
        """There is nothing to let go."""


class Arrival(Target):
    """One tensor that the peer has announced, and where its bytes belong.

    Verified, it is the ``tensor``, or lies in the ``region`` of a GPU. ``place`` is
    where the peer shows it, with the ``digest`` of what is compared of it there.
    """

    __slots__ = (
        "digest",
        "in_host",
        "incoming",
        "is_on_gpu",
        "is_read_out",
        "is_verified",
        "may_be_routed",
        "place",
        "region",
        "spec",
        "tensor",
        "transfer",
    )

    def __init__(self, push: Push, spec: TensorSpec) -> None:
        self.spec = spec
        self.nbytes = spec.nbytes
        self.transfer = push.transfer
        self.place: Place | None = push.place
        self.digest = push.digest
        self.is_on_gpu = push.on_gpu
        """Does it lie on the peer's GPU?"""
        self.may_be_routed = True
        """Was it on no way to a GPU of this side's yet?"""
        self.tensor: torch.Tensor | None = None
        self.region: DeviceRegion | None = None
        self.incoming: Incoming | None = None
        self.in_host: asyncio.Future[None] | None = None
        """Done when there is memory of the host, which it needs after all."""
        self.is_verified = False
        self.is_read_out = False
        """Is it just copied to where the application wants it?"""

    @property
    def is_on_device(self) -> bool:
        return self.region is not None

    def host(self) -> Memory:
        if self.tensor is None:
            raise TypeError("there is no memory of the host for it")
        return bytes_of(self.tensor)

    def device(self) -> DeviceMemory:
        return device_memory(self.region, self.spec)

    def give_up(self, error: GPUFailed) -> None:
        """Nobody else gets that memory for as long as the GPU has it."""

    def release(self) -> None:
        """The memory of a GPU is not needed any more. Never waits."""
        if self.region is not None:
            self.region.release()
            self.region = None


_T = TypeVar("_T")

_WAIT_S: Final = 0.002


class ReadAhead(Generic[_T]):
    """When a pipe copies what the peer shows before the application asks for it.

    At once where the application takes what it is given. Where it says ``into=`` what,
    the copying waits for that a little while: then there is one copy, not two. It calls
    ``begin`` for each that is added, soon or later, unless it is forgotten.
    """

    def __init__(self, begin: Callable[[_T], None]) -> None:
        self._begin = begin
        self._waiting: dict[_T, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._wants_into = True  # nobody knows yet
        self._was_asked = False
        self._count = 1
        self.is_paused = False
        """Is one just being copied to where the application wants it?"""

    def add(self, arrival: _T) -> None:
        """It can be copied. Never waits."""
        if self._wants_into:
            self._waiting[arrival] = None
            self._recheck_later()
        else:
            self._begin(arrival)

    def forget(self, arrival: _T) -> None:
        """It is copied already, or nobody wants it any more."""
        self._waiting.pop(arrival, None)
        if not self._waiting:
            self.stop()

    def asked(self, *, into: bool) -> None:
        """The application asks for the next tensor."""
        self._was_asked, self._count = True, 1
        self._wants_into = into
        if self._waiting and not into:
            self._begin_some(len(self._waiting))

    def stop(self) -> None:
        """Begin nothing more, until more is added."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _recheck_later(self) -> None:
        if self._timer is None and self._waiting:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_WAIT_S, self._recheck)

    def _recheck(self) -> None:
        self._timer = None
        if not (self._was_asked or self.is_paused):
            self._begin_some(self._count)
            self._count *= 2  # who has not asked for so long may not ask soon
        self._was_asked = False
        self._recheck_later()

    def _begin_some(self, count: int) -> None:
        for arrival in list(self._waiting)[:count]:
            del self._waiting[arrival]
            self._begin(arrival)
        if not self._waiting:
            self.stop()


class Grants:
    """Gives what the peer has announced memory to come to: of a GPU, or of the host.

    What finds none comes when :meth:`grant` is called for it again. ``landed`` is told
    what is whole, ``failed`` of what has other bytes than were sent, and ``changed``
    when what has waited for a slab is on its way.
    """

    def __init__(
        self,
        stream: LinkStream,
        max_bytes: int,
        *,
        landed: Callable[[Arrival], None],
        failed: Callable[[Arrival, str], None],
        changed: Callable[[], None],
    ) -> None:
        self.gpus: GpuSide | None = None
        self.mapping: MapSharing | None = None
        self.ahead: ReadAhead[Arrival] = ReadAhead(self.try_to_grant)
        self._stream = stream
        self._landed, self._failed, self._changed = landed, failed, changed
        self._max_bytes = max_bytes
        self._memory = Growth(max_bytes, self._grant_waiting)
        self._coming: dict[int, Arrival] = {}
        self._to_grant: dict[Arrival, None] = {}
        """What waits for a slab, the first one first."""

    def expect(self, arrival: Arrival) -> None:
        """It was announced: let it come, unless it is above the bound. Never waits.

        :raises RemoteProtocolError: it is shown where nothing can be, or was before
        """
        if arrival.place is not None:
            self._check_exported(arrival, arrival.place)
        self._stream.link.payload.announce(arrival.transfer)
        self.let_come(arrival)

    def let_come(self, arrival: Arrival) -> None:
        """Let it come, read or granted, unless it is above the bound. Never waits.

        Once more if a call that read it has ended before it was whole.
        """
        if arrival.nbytes > self._max_bytes:
            return
        if self.can_read(arrival):
            self.ahead.add(arrival)
        else:
            self.try_to_grant(arrival)

    def can_read(self, arrival: Arrival | SmallArrival) -> bool:
        """Can it be copied from where the peer shows it, and is it not yet?"""
        if self.mapping is None or not isinstance(arrival, Arrival):
            return False
        is_shown = arrival.place is not None and self.mapping.can_read
        return is_shown and not (arrival.incoming or arrival.is_verified)

    async def read(self, arrival: Arrival, into: torch.Tensor) -> None:
        """Copy it from where the peer shows it, as :meth:`MapSharing.read`."""
        if arrival.place is None or self.mapping is None:
            raise PeerLost("the peer shows it nowhere")
        self.ahead.forget(arrival)
        self.ahead.is_paused = arrival.is_read_out = True
        try:
            await self.mapping.read(arrival.place, arrival.digest, bytes_of(into))
        finally:
            self.ahead.is_paused = arrival.is_read_out = False

    def try_to_grant(self, arrival: Arrival) -> None:
        """As :meth:`grant`; without memory it comes when it is waited for."""
        with contextlib.suppress(MemoryError):
            self.grant(arrival)

    def grant(self, arrival: Arrival) -> None:
        """Let it come, unless it does already. Never waits.

        :raises MemoryError: there is none for a tensor above the bound
        """
        in_host = arrival.in_host
        if arrival.is_read_out or (arrival.incoming is not None and in_host is None):
            return
        route = self._route_to_gpu(arrival)
        if route is None and not self._has_host_memory(arrival):
            return
        if in_host is not None:
            arrival.in_host = None
            in_host.set_result(None)
        else:
            self.ahead.forget(arrival)
            self._receive(arrival, route or self._route_to_host(arrival))

    def on_sent(self, frame: Sent) -> None:
        """The peer has sent a tensor's last byte.

        :raises RemoteProtocolError: it was never granted, or makes no sense
        """
        arrival = self._coming.get(frame.transfer)
        receive_frame(None if arrival is None else arrival.incoming, frame, b"")

    def forget(self, arrival: Arrival) -> None:
        """Nobody wants it any more, and it comes no further. Never waits."""
        self._to_grant.pop(arrival, None)
        if arrival.incoming is not None:
            arrival.incoming.stop()
        self.end(arrival)
        arrival.release()
        self.ahead.forget(arrival)

    async def aclose(self) -> None:
        """Give idle memory back. Bounded; what was taken keeps its own."""
        await self._memory.aclose()

    def abort(self) -> None:
        """As :meth:`aclose`, but never waits."""
        self._memory.close()

    def end(self, arrival: Arrival) -> None:
        """It is whole, or comes no further."""
        arrival.incoming = None
        self._coming.pop(arrival.transfer, None)
        if self.mapping is not None and arrival.place is not None:
            self.mapping.release(arrival.place)

    def _check_exported(self, arrival: Arrival, place: Place) -> None:
        sharing = self.mapping if self.gpus is None else self.gpus.sharing
        if sharing is None:
            raise RemoteProtocolError("a tensor in memory that is not mapped")
        sharing.claim(place, arrival.nbytes)

    def _route_to_gpu(self, arrival: Arrival) -> Route | None:
        """Take memory of the GPU, if it can come there by a route; only once."""
        gpus = self.gpus
        if gpus is None or not arrival.may_be_routed:
            return None
        route = gpus.route(arrival.place, arrival.digest, is_on_gpu=arrival.is_on_gpu)
        if route is not None:
            arrival.region = gpus.spare(arrival.nbytes)
        if arrival.region is None:
            return None
        arrival.may_be_routed = False
        return route

    def _route_to_host(self, arrival: Arrival) -> Route | None:
        """Return by what it comes that the peer shows in memory of its host's."""
        if arrival.place is None or self.mapping is None:
            return None
        return self.mapping.route(arrival.place, arrival.digest)

    def _has_host_memory(self, arrival: Arrival) -> bool:
        """Take memory of the host, now or when a slab is there."""
        if self._memory.awaits(arrival.nbytes):
            self._to_grant[arrival] = None
            return False
        nbytes = arrival.nbytes
        try:
            arrival.tensor = self._memory.spares.spare(arrival.spec)
        except RuntimeError as exc:
            raise MemoryError(f"none for a tensor of {nbytes} bytes") from exc
        return True

    def _receive(self, arrival: Arrival, route: Route | None) -> None:
        arrival.incoming = Incoming(
            *(self._stream, arrival.transfer, [arrival]),
            lambda part, digest: self._landed(arrival),
            partial(self._has_failed, arrival),
            route=None if route is None else lambda: route,
            room=partial(self._reserve_in_host, arrival),
            is_eager=False,
        )
        self._coming[arrival.transfer] = arrival
        arrival.incoming.grant()

    async def _reserve_in_host(self, arrival: Arrival) -> None:
        """Wait for memory of the host, where a route to another was lost."""
        arrival.release()
        if arrival.tensor is None:
            arrival.in_host = in_host = asyncio.get_running_loop().create_future()
            self.try_to_grant(arrival)
            self._changed()
            await in_host

    def _has_failed(self, arrival: Arrival, error: Exception) -> None:
        if isinstance(error, ChecksumError):
            self._failed(arrival, error.message)
            return
        # The GPU cannot say what it has. The peer has it still.
        arrival.incoming = None
        arrival.release()
        self.try_to_grant(arrival)
        self._changed()

    def _grant_waiting(self) -> None:
        waiting, self._to_grant = self._to_grant, {}
        for arrival in waiting:
            self.try_to_grant(arrival)
        if waiting:
            self._changed()
