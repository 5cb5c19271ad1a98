"""One tensor of a pipe on its way, and the two limits that every pipe has."""

from __future__ import annotations

import asyncio
from typing import Final

import torch

from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_regions import DeviceRegion
from asynckv.tensors.slab_regions import SlabRegion
from asynckv.types import TensorSpec

__all__ = ("INLINE_NBYTES", "MAX_TENSORS", "Parcel")

INLINE_NBYTES: Final = 64 * 1024
"""A tensor of so many bytes rides with its frame."""

MAX_TENSORS: Final = 4096
"""So many tensors are in flight, or wait to be received, however small."""


class Parcel:
    """One tensor, or None, on its way to the peer.

    ``memory`` is the pipe's own copy, while it is still needed, or the caller's if it
    ``is_lent``; it is ``shared`` where peers of this host could read it. One on a GPU
    has a ``region`` there. With ``is_sent`` its last byte has
    left.
    """

    __slots__ = (
        "digest",
        "has_room",
        "is_copied",
        "is_lent",
        "is_sent",
        "memory",
        "nbytes",
        "region",
        "shared",
        "spec",
        "transfer",
        "turn",
        "watchers",
    )

    def __init__(self, spec: TensorSpec | None) -> None:
        self.spec = spec
        self.nbytes = 0 if spec is None else spec.nbytes
        self.memory: torch.Tensor | None = None
        self.region: DeviceRegion | None = None
        self.shared: SlabRegion | None = None
        self.is_sent = self.is_lent = False
        self.digest = b""
        self.has_room = False
        self.is_copied = False
        self.transfer = 0
        self.turn: asyncio.Future[None] | None = None
        self.watchers: list[asyncio.Future[bool]] = []

    def wake(self) -> None:
        """Whoever waits for its room looks again."""
        if self.turn is not None and not self.turn.done():
            self.turn.set_result(None)

    def place(self) -> DeviceMemory:
        """Return the bytes of the copy on the GPU; whoever has them keeps them."""
        place = None
        if self.region is not None and self.spec is not None:
            place = self.region.place(self.spec)
        if not isinstance(place, DeviceMemory):
            raise RuntimeError("it is on no GPU")
        return place

    def let_go(self) -> None:
        """No copy is needed any more."""
        self.memory = self.shared = None
        self.leave_gpu()

    def leave_gpu(self) -> None:
        """The copy on the GPU is not needed any more."""
        if self.region is not None:
            self.region.release()
            self.region = None

    def settle(self, *, is_verified: bool) -> None:
        """Whoever waits for its arrival learns whether the peer has it."""
        for watcher in self.watchers:
            if not watcher.done():
                watcher.set_result(is_verified)
