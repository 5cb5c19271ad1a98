"""The receiving half of a pipe, and a link that does what a test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from asynckv.errors import ChecksumError
from asynckv.pipes.inbound import Inbound
from asynckv.protocol.frames import Frame, Push, PushSmall
from asynckv.protocol.transfer_frames import Sent
from asynckv.protocol.wire import digest_of
from asynckv.types import TensorSpec

__all__ = ("HALF_BYTES", "HalfLink", "ReceivingHalf")

HALF_BYTES: Final = 2**20
"""The bound of such a half."""


class HalfLink:
    """As much of a link as a receiver uses; it is its own payload transport.

    ``announced`` and ``stopped`` are transfers; what lands of one is told to whom
    ``landing`` has.
    """

    def __init__(self) -> None:
        self.digest = "full"
        self.announced: list[int] = []
        self.stopped: list[int] = []
        self.landing: dict[int, Callable[[bytes, BaseException | None], None]] = {}
        self.payload = self
        self.progress = self

    def expect(self, transfer: int) -> None: ...

    def forget(self, transfer: int) -> None: ...

    def announce(self, transfer: int) -> None:
        self.announced.append(transfer)

    def receive(self, transfer: int, part: int, target: memoryview, done: Any) -> None:
        self.landing[transfer] = done

    def stop(self, transfer: int) -> None:
        self.stopped.append(transfer)


class ReceivingHalf:
    """An inbound half, open; ``frames`` are what it said, ``broken`` what broke it."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.broken: list[ChecksumError] = []
        self.link = HalfLink()
        self.half = Inbound(
            self.link,  # type: ignore[arg-type]
            lambda frame, body: self.frames.append(frame),
            HALF_BYTES,
            self.broken.append,
        )
        self.half.open()
        self.half.reports.tell()
        self.frames.clear()

    def push(self, nbytes: int, transfer: int = 1, dtype: str = "uint8") -> None:
        """The peer sends a tensor of zeros; a small one rides along."""
        spec = TensorSpec((nbytes,), dtype)
        if nbytes > 2**16:
            self.half.on_push(Push(transfer, 0, inline=False, spec=spec), b"")
        else:
            self.send(bytes(nbytes), spec)

    def send(self, body: bytes, spec: TensorSpec | None = None) -> None:
        """The peer sends a small tensor of these bytes."""
        spec = spec or TensorSpec((len(body),), "uint8")
        self.half.on_push_small(PushSmall(spec, digest_of(body)), body)

    def land(self, transfer: int = 1, *, sent: bytes = b"d") -> None:
        """All of a large one has landed; the peer says its digest is ``sent``."""
        self.link.landing[transfer](b"d", None)
        self.half.granting.on_sent(Sent(transfer, 0, sent))

    async def next(self) -> torch.Tensor | None:
        """Wait for the next tensor, and take it."""
        arrival = await self.half.head()
        tensor = self.half.tensor_of(arrival)
        self.half.take(arrival)
        return tensor
