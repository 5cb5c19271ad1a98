"""One end of a pipe's stream: hears its frames, and how it ended."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from asynckv.devices.opening import OpenDevice
from asynckv.errors import ConfigError, PeerLost, RemoteProtocolError
from asynckv.links.link import Link, LinkStream
from asynckv.links.options import Digest
from asynckv.links.streams import StreamHandler
from asynckv.pipes.gpu_side import GpuSide
from asynckv.pipes.inbound import Inbound
from asynckv.pipes.outbound import Outbound
from asynckv.pipes.shared_memory import MapSharing
from asynckv.protocol.codec import Buffer
from asynckv.protocol.failures import from_failure, to_failure
from asynckv.protocol.frames import (
    Failure,
    Flushed,
    Frame,
    OpenPipe,
    Push,
    Read,
)
from asynckv.protocol.transfer_frames import (
    Grant,
    OpenDevices,
    OpenMemory,
    Sent,
)
from asynckv.sharing.gpu_channel import DeviceStream
from asynckv.sharing.handshake import Handshake
from asynckv.types import TensorSpec

__all__ = ("PipeEnd",)


class PipeEnd:
    """Both halves of a pipe, over the one stream of a link of its own."""

    def __init__(
        self,
        link: Link,
        max_bytes: int,
        stream: LinkStream | None = None,
        name: str = "",
    ) -> None:
        self.link = link
        self.gpus: GpuSide | None = None
        self._has_dialled = stream is None
        self._stream = stream or link.open_stream(self, OpenPipe(name))
        self.outbound = Outbound(self._stream, self._send_small, max_bytes, self._break)
        self.inbound = Inbound(self._stream, max_bytes, self._break)
        self._is_over = False
        self._max_bytes = max_bytes
        self._may_be_asked = False
        self._terms: tuple[OpenDevice, Digest] | None = None
        self._asked: dict[type[Frame], Callable[[GpuSide], None]] = {}
        self._mapping: MapSharing | None = None
        self._handshake: Handshake | None = None
        self._may_share: bool | None = None

    @classmethod
    def dialled(cls, link: Link, max_bytes: int, name: str = "") -> PipeEnd:
        """Make ``link`` a pipe. The peer may send from here on."""
        end = cls(link, max_bytes, name=name)
        end.inbound.open()
        return end

    @classmethod
    def asked_for(
        cls, stream: LinkStream, max_bytes: int, *, has_gpu: bool = False
    ) -> PipeEnd:
        """Answer the peer that made its link a pipe.

        It sends nothing before ``inbound.open()``. With ``has_gpu`` it may ask to
        share a GPU, and to connect two: :meth:`connect_gpus` is to follow.
        """
        end = cls(stream.link, max_bytes, stream)
        end._may_be_asked = has_gpu
        return end

    @property
    def is_mapped(self) -> bool:
        """Does the peer read what is sent in memory of this side's?"""
        return self._mapping is not None and self._mapping.is_open

    def share_memory(self, opened: OpenDevice | None, digest: Digest) -> None:
        """Let each side read what the other sends in its memory, once that can be.

        Not where what is received goes to a GPU. ``digest`` is the pipe's option. Never
        waits.
        """
        is_over = self._is_over or not self.link.may_map
        self._may_share = opened is None and not is_over
        if self._may_share:
            self._mapping = self.outbound.share_memory(digest)
            self.inbound.granting.mapping = self._mapping
            if self._has_dialled:
                self._mapping.open_soon()
        if self._handshake is not None:
            self._answer_mapping(self._handshake)

    def asked_to_share(
        self, stream: LinkStream, frame: OpenDevices | OpenMemory
    ) -> StreamHandler:
        """The peer asks to share memory, or to connect GPUs: begin when this side can.

        :raises ConfigError: it may not, has no GPU, or was asked so before
        """
        if isinstance(frame, OpenDevices):
            return self._asked_for_gpus(stream, frame)
        if frame.of != "pipe":
            raise ConfigError(f"a pipe has no memory of {frame.of}")
        if frame.gpu_uuid:
            return self._asked_for_gpus(stream, frame)
        return self._asked_to_map(stream, frame)

    def _asked_to_map(self, stream: LinkStream, frame: OpenMemory) -> StreamHandler:
        handshake = Handshake.answer(stream, frame)
        if self._has_dialled or self._handshake or self._is_over:
            raise ConfigError("this side of the pipe shares no memory")
        self._handshake = handshake
        if self._may_share is not None:
            self._answer_mapping(handshake)
        return handshake

    def _answer_mapping(self, handshake: Handshake) -> None:
        if self._mapping is None:
            handshake.refuse(ConfigError("this side of the pipe shares no host memory"))
        else:
            self._mapping.open_soon(handshake)

    def connect_gpus(self, opened: OpenDevice | None, digest: Digest) -> None:
        """Let payload go from GPU to GPU as soon as that can be. Never waits.

        ``digest`` is the pipe's option.
        """
        if opened is None or self._is_over or self.link.transport_name == "mem":
            return
        self._terms = opened, digest
        if self._has_dialled:
            self._on_gpu(*self._terms).opening.ask()
        for answer in self._asked.values():
            answer(self._on_gpu(*self._terms))

    def _asked_for_gpus(
        self, stream: LinkStream, frame: OpenDevices | OpenMemory
    ) -> StreamHandler:
        if not self._may_be_asked or type(frame) in self._asked or self._is_over:
            raise ConfigError("this side of the pipe has no GPU to connect")
        handler, answer = _received(stream, frame)
        self._asked[type(frame)] = answer
        if self._terms is not None:
            answer(self._on_gpu(*self._terms))
        return handler

    def on_frame(self, frame: Frame, body: bytes) -> None:
        if self._is_over:
            return
        if type(frame) is Push:
            if frame.flushed_tensors:
                self.outbound.has_verified(frame.flushed_tensors)
            self.inbound.on_push(frame, body)
        elif type(frame) is Flushed:
            self.outbound.has_verified(frame.tensors)
        else:
            self._on_other(frame)

    def _on_other(self, frame: Frame) -> None:
        match frame:
            case Sent():
                self.inbound.granting.on_sent(frame)
            case Grant():
                self.outbound.on_grant(frame)
            case Read():
                self.outbound.has_room(frame.nbytes, frame.tensors)
            case Failure():
                error = from_failure(frame)
                self.abort(PeerLost(f"the peer broke the pipe: {error}"))
            case _:
                raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")

    def on_lost(self, error: PeerLost) -> None:
        self._end(error)

    async def aclose(self) -> None:
        """Say goodbye, and hang up. Bounded and shielded; may be called again."""
        self.inbound.reports.tell()
        error = PeerLost("the pipe was closed on this side")
        error.goodbye = True
        self._end(error)
        self.inbound.end(error, keep=False)
        try:
            if self.gpus is not None:
                await self.gpus.opening.let_meet()
            await self.link.aclose()
        finally:
            with anyio.CancelScope(shield=True):
                if self._mapping is not None:
                    await self._mapping.aclose()
                await self.inbound.granting.aclose()
                await self.outbound.aclose()
                if self.gpus is not None:
                    await self.gpus.aclose()

    def abort(self, error: PeerLost | None = None) -> None:
        """Hang up now. What has come whole can be taken if the peer is at fault.

        Never waits.
        """
        ours = PeerLost("the pipe was aborted on this side")
        self._end(error or ours)
        self.link.abort(error or ours)
        if error is None:
            self.inbound.end(ours, keep=False)
            if self._mapping is not None:
                self._mapping.abort()
            self.inbound.granting.abort()
            self.outbound.abort()
            if self.gpus is not None:
                self.gpus.abort()

    def _send_small(self, spec: TensorSpec | None, digest: bytes, body: Buffer) -> None:
        flushed = self.inbound.reports.take_verified()
        push = Push(0, 0, True, spec, digest, False, None, flushed)
        self._stream.send_at_once(push, body)

    def _on_gpu(self, opened: OpenDevice, digest: Digest) -> GpuSide:
        if self.gpus is None:
            self.gpus = GpuSide(self.link, opened, self._max_bytes, digest)
            self.inbound.granting.gpus = self.outbound.gpus = self.gpus
        return self.gpus

    def _break(self, error: Exception) -> None:
        self._stream.send(to_failure(error))
        self._end(PeerLost(f"the pipe is broken: {error}"))

    def _end(self, error: PeerLost) -> None:
        self._is_over = True
        self.outbound.end(error)
        self.inbound.end(error)


def _received(
    stream: LinkStream, frame: OpenDevices | OpenMemory
) -> tuple[StreamHandler, Callable[[GpuSide], None]]:
    """Return who hears what the peer says, and what answers it when there is a GPU."""
    if isinstance(frame, OpenMemory):
        handshake = Handshake.answer(stream, frame)
        return handshake, lambda gpus: gpus.opening.share(handshake)
    channel = DeviceStream.answer(stream)
    return channel, lambda gpus: gpus.opening.answer(channel, frame)
