"""One tensor that comes through a pipe: into memory of the host, or of a GPU."""

from __future__ import annotations

import asyncio
from typing import ClassVar, Protocol

import msgspec
import torch

from asynckv.errors import ChecksumError, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.pipes.gpu_side import GpuSide
from asynckv.pipes.map_sharing import MapSharing
from asynckv.protocol.frames import Push
from asynckv.protocol.transfer_frames import (
    Grant,
    PushMapped,
    PushShared,
    Sent,
)
from asynckv.sharing.gpu_channel import NcclRoute
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_regions import DeviceRegion
from asynckv.transfers.reception import Reception
from asynckv.types import TensorSpec

__all__ = ("Arrival", "ArrivalSink", "SmallArrival")


class ArrivalSink(Protocol):
    """Who receives what comes. Called on the loop; never waits."""

    def verified(self, arrival: Arrival) -> None:
        """All bytes of it are here, and are those that were sent."""

    def fail(self, arrival: Arrival, message: str) -> None:
        """Its bytes changed on their way."""

    def land_again(self, arrival: Arrival) -> None:
        """It cannot come from GPU to GPU: the peer still has it."""


class SmallArrival(msgspec.Struct, eq=False):
    """One small tensor, or None, that has come whole: its bytes."""

    spec: TensorSpec | None
    body: bytes
    nbytes: int
    is_verified: ClassVar = True
    region: ClassVar = None

    def let_go(self) -> None:
        """There is nothing to let go."""


class Arrival:
    """One tensor that the peer has announced.

    Verified, it is the ``tensor``, or lies in the ``region`` of a GPU.
    """

    __slots__ = (
        "_by_gpu",
        "_may_come_by_gpu",
        "_reading",
        "_shown",
        "_was_on_gpu",
        "inbound",
        "is_read_out",
        "is_verified",
        "mapped",
        "reception",
        "region",
        "spec",
        "tensor",
        "transfer",
    )

    def __init__(
        self, inbound: ArrivalSink, frame: Push | PushShared | PushMapped
    ) -> None:
        self.inbound = inbound
        self.spec: TensorSpec | None = frame.spec
        self.transfer = frame.transfer
        self.tensor: torch.Tensor | None = None
        self.region: DeviceRegion | None = None
        self.reception: Reception | None = None
        self.is_verified = False
        self.mapped = frame if isinstance(frame, PushMapped) else None
        """Where the peer shows it, whoever reads it there."""
        self.is_read_out = False
        """Is it just copied to where the application wants it?"""
        self._by_gpu: NcclRoute | None = None
        self._was_on_gpu = False
        self._may_come_by_gpu = isinstance(frame, Push) and frame.on_gpu
        self._shown = frame if isinstance(frame, PushShared) else None
        self._reading: asyncio.Task[None] | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.spec is None else self.spec.nbytes

    @property
    def is_landing(self) -> bool:
        """Is it on its way into memory of this side?"""
        is_read = self._reading is not None or self.is_read_out
        return is_read or self.reception is not None

    def read_on_gpu(self, gpus: GpuSide) -> bool:
        """Copy it from where the peer has it, if there is room; only once.

        Never waits.
        """
        shown, self._shown = self._shown, None
        if shown is None or self.spec is None or not gpus.sharing.is_open:
            return False
        if (region := gpus.spare(self.nbytes)) is None:
            return False
        self.region = region
        place = _place(region, self.spec)
        self._reading = gpus.sharing.read(shown, place, self._read)
        return True

    def read_mapped(self, mapping: MapSharing) -> bool:
        """Copy it to its ``tensor`` from where the peer shows it, if it does."""
        if self.mapped is None or self.tensor is None or not mapping.can_read:
            return False
        self._reading = mapping.begin_read(self.mapped, self.tensor, self._read)
        return True

    def land_on_gpu(self, link: Link, gpus: GpuSide) -> Grant | None:
        """Let it land in memory of the GPU, if there is a way and room; only once.

        Returns what the peer is told then. Never waits.
        """
        by_gpu = gpus.device_route() if self._may_come_by_gpu else None
        region = None if by_gpu is None else gpus.spare(self.nbytes)
        if self.spec is None or by_gpu is None or region is None:
            return None
        place = _place(region, self.spec)
        self.region, self._by_gpu, self._was_on_gpu = region, by_gpu, True
        self._may_come_by_gpu = False
        self.reception = Reception(link, self.transfer, self)
        self.reception.begin_by(by_gpu, place)
        return by_gpu.grant(self.transfer)

    def on_routed_sent(self, frame: Sent) -> None:
        """The peer has sent it, from GPU to GPU.

        :raises RemoteProtocolError: it was not to, or not so
        """
        if not self._was_on_gpu or frame.part:
            raise RemoteProtocolError("a tensor of a GPU that was not asked for")
        if self._by_gpu is not None and self.reception is not None:
            self._by_gpu.sent(frame)

    def let_go(self) -> None:
        """The memory of a GPU is not needed any more. Never waits."""
        self._by_gpu = None
        if self._reading is not None:
            self._reading.cancel()  # it keeps the memory for as long as it takes
            self._reading = None
        if self.region is not None:
            self.region.release()
            self.region = None

    def part_verified(self) -> None:
        self._by_gpu = None
        self.inbound.verified(self)

    def reception_failed(self, error: Exception) -> None:
        if self._by_gpu is None or isinstance(error, ChecksumError):
            self.inbound.fail(self, str(error))
            return
        self.let_go()
        self.reception = None
        self.inbound.land_again(self)

    def _read(self, error: Exception | None) -> None:
        self._reading = None
        if error is None:
            self.inbound.verified(self)
        elif isinstance(error, ChecksumError):
            self.inbound.fail(self, str(error))
        else:
            self.let_go()
            self.inbound.land_again(self)


def _place(region: DeviceRegion, spec: TensorSpec) -> DeviceMemory:
    place = region.place(spec)
    if not isinstance(place, DeviceMemory):
        raise TypeError("a region of a GPU lies elsewhere")
    return place
