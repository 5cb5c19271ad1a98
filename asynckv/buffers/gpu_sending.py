"""Parts on their way from this side's GPU to a peer's, and what is said of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from asynckv.links.gpu_link import GpuLink
from asynckv.links.requests import LinkStream
from asynckv.protocol.device_frames import GrantDevices, SentDevices
from asynckv.protocol.handshake import strictest
from asynckv.tensors.arena import Region
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_regions import DeviceRegion
from asynckv.types import TensorSpec

__all__ = ("DigestPart", "GpuSending")

DigestPart: TypeAlias = Callable[
    [Region, TensorSpec, Callable[[bytes], None]], "asyncio.Task[None]"
]
"""Digests one part, off the loop, then calls back. Cancelled, it does not."""


class GpuSending:
    """One transfer that the peer has granted memory of its GPU. Nothing here waits."""

    def __init__(
        self,
        way: GpuLink,
        stream: LinkStream,
        granted: GrantDevices,
        digest_part: DigestPart,
    ) -> None:
        self._transport = way.transport
        self._stream = stream
        self._transfer = granted.transfer
        self._kind = strictest(way.digest, granted.kind)
        self._digest_part = digest_part
        self._digesting: list[asyncio.Task[None]] = []

    def send(
        self, index: int, region: Region, spec: TensorSpec, digest: bytes | None
    ) -> None:
        """Send one part; ``digest`` is its own, if that is known."""
        place = region.place(spec)

        def sent(_: bytes, error: BaseException | None) -> None:
            if error is None:  # else the peer hears that the way is lost
                self._tell(index, region, spec, digest)

        memory = place if isinstance(place, DeviceMemory) else region.memory()
        self._transport.send(self._transfer, index, memory, sent)

    def stop(self) -> None:
        """Send no more."""
        self._transport.stop(self._transfer)
        for task in self._digesting:
            task.cancel()

    def _tell(
        self, index: int, region: Region, spec: TensorSpec, digest: bytes | None
    ) -> None:
        transfer, stream = self._transfer, self._stream
        edges = region.edges if isinstance(region, DeviceRegion) else b""

        def tell(digest: bytes) -> None:
            stream.send(SentDevices(transfer, index, "full", digest))

        if self._kind == "off":
            stream.send(SentDevices(transfer, index, "off"))
        elif self._kind == "edges" and edges:
            stream.send(SentDevices(transfer, index, "edges", edges))
        elif digest:
            tell(digest)
        else:
            self._digesting.append(self._digest_part(region, spec, tell))
