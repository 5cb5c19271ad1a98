"""What a peer is told of parts that are on a GPU: that they are there, and a digest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from asynckv.links.requests import LinkStream
from asynckv.protocol.device_frames import SentDevices
from asynckv.protocol.handshake import DigestMode
from asynckv.tensors.arena import Region
from asynckv.tensors.device_regions import DeviceRegion
from asynckv.types import TensorSpec

__all__ = ("DigestPart", "Telling")

DigestPart: TypeAlias = Callable[
    [Region, TensorSpec, Callable[[bytes], None]], "asyncio.Task[None]"
]
"""Digests one part, off the loop, then calls back. Cancelled, it does not."""


class Telling:
    """What is told of one transfer; ``kind`` is what both sides want to be compared."""

    def __init__(
        self,
        stream: LinkStream,
        transfer: int,
        kind: DigestMode,
        digest_part: DigestPart,
    ) -> None:
        self._stream = stream
        self._transfer = transfer
        self._kind: DigestMode = kind
        self._digest_part = digest_part
        self._digesting: list[asyncio.Task[None]] = []

    def tell(
        self, index: int, region: Region, spec: TensorSpec, digest: bytes | None
    ) -> None:
        """Say that the peer has a part, or finds it; ``digest`` is its own, if known.

        Later, if neither that nor the part's edges are known. Never waits.
        """
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

    def stop(self) -> None:
        """Say nothing more. Never waits."""
        for task in self._digesting:
            task.cancel()
