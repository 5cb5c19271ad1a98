"""The receiving half of a pipe, and a link that does what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import torch

from asynckv.errors import ChecksumError
from asynckv.pipes.inbound import Inbound
from asynckv.protocol.frames import Frame, Push
from asynckv.protocol.transfer_frames import Sent
from asynckv.protocol.wire import digest_of
from asynckv.types import TensorSpec

__all__ = ("HALF_BYTES", "HalfLink", "ReceivingHalf")

HALF_BYTES: Final = 2**20
"""The bound of such a half."""


class HalfLink:
    """As much of a link as a receiver uses; it is its own stream and transport.

    ``frames`` were sent; ``announced`` and ``stopped`` are transfers; what lands of one
    is told to whom ``landing`` has.
    """

    def __init__(self) -> None:
        self.digest = "full"
        self.loop = asyncio.get_running_loop()
        self.frames: list[Frame] = []
        self.announced: list[int] = []
        self.stopped: list[int] = []
        self.landing: dict[int, Callable[[bytes, BaseException | None], None]] = {}
        self.link = self.payload = self.progress = self

    def send(self, frame: Frame, body: bytes = b"") -> None:
        self.frames.append(frame)

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
        self.broken: list[ChecksumError] = []
        self.link = HalfLink()
        self.frames = self.link.frames
        self.half = Inbound(
            self.link,  # type: ignore[arg-type]
            HALF_BYTES,
            self.broken.append,
        )
        self.half.open()
        self.half.reports.tell()
        self.frames.clear()

    def push(self, nbytes: int, transfer: int = 1, dtype: str = "uint8") -> None:
        """The peer sends a tensor of zeros; a small one comes along."""
        spec = TensorSpec((nbytes,), dtype)
        if nbytes > 2**16:
            self.half.on_push(Push(transfer, spec=spec), b"")
        else:
            self.send(bytes(nbytes), spec)

    def send(self, body: bytes, spec: TensorSpec | None = None) -> None:
        """The peer sends a small tensor of these bytes."""
        spec = spec or TensorSpec((len(body),), "uint8")
        push = Push(inline=True, spec=spec, digest=digest_of(body))
        self.half.on_push(push, body)

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
