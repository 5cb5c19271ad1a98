"""One tensor of a pipe on its way, and the two limits that every pipe has."""

from __future__ import annotations

import asyncio
from typing import Final

import torch

from asynckv.types import TensorSpec

__all__ = ("INLINE_NBYTES", "MAX_TENSORS", "Parcel")

INLINE_NBYTES: Final = 64 * 1024
"""A tensor of so many bytes rides with its frame."""

MAX_TENSORS: Final = 4096
"""So many tensors are in flight, or wait to be received, however small."""


class Parcel:
    """One tensor, or None, on its way to the peer.

    ``memory`` is the pipe's own copy, while it is still needed.
    """

    __slots__ = (
        "digest",
        "has_room",
        "is_copied",
        "memory",
        "nbytes",
        "spec",
        "transfer",
        "turn",
        "watchers",
    )

    def __init__(self, spec: TensorSpec | None) -> None:
        self.spec = spec
        self.nbytes = 0 if spec is None else spec.nbytes
        self.memory: torch.Tensor | None = None
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

    def settle(self, *, is_verified: bool) -> None:
        """Whoever waits for its arrival learns whether the peer has it."""
        for watcher in self.watchers:
            if not watcher.done():
                watcher.set_result(is_verified)
