"""The stream of a link by which two GPUs' transports agree on what they move.

Frames alone: payload goes from GPU to GPU. The link is authenticated, and so is what
lets a peer into a communicator: it is said here and nowhere else.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

from asynckv.abc import PayloadTransport
from asynckv.errors import PeerLost, RemoteProtocolError
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.failures import from_failure, to_failure
from asynckv.protocol.frames import Accepted, Failure, Frame
from asynckv.protocol.transfer_frames import DeviceFrame, Devices, OpenDevices

__all__ = (
    "MAX_UNHEARD",
    "DeviceStream",
    "ask_devices",
    "open_devices",
)

MAX_UNHEARD = 1024
"""So many frames may come before somebody hears them."""


class DeviceStream:
    """One side of the stream; fits
    :class:`~asynckv.transports.nccl.transport.DeviceChannel`.

    Frames that come before it is attached to are kept, and handed on then.
    """

    def __init__(self, *, answers: bool) -> None:
        self._answers = answers
        self._stream: LinkStream | None = None
        self._came: collections.deque[DeviceFrame] = collections.deque()
        self._hear: Callable[[DeviceFrame], None] | None = None
        self._lost: Callable[[Exception], None] | None = None
        self._error: Exception | None = None
        self._is_over = False
        loop = asyncio.get_running_loop()
        self._description: asyncio.Future[bytes] = loop.create_future()

    def use(self, stream: LinkStream) -> None:
        """Send by ``stream`` from here on."""
        self._stream = stream

    async def description(self) -> bytes:
        """Wait for what the peer says of itself.

        :raises PeerLost: the link ended first
        :raises AsyncKVError: the peer has refused
        """
        return await asyncio.shield(self._description)

    def send(self, frame: DeviceFrame) -> None:
        if self._stream is not None and not self._is_over:
            self._stream.send(frame)

    def attach(
        self,
        hear: Callable[[DeviceFrame], None],
        lost: Callable[[Exception], None],
    ) -> None:
        self._hear, self._lost = hear, lost
        # Not within whoever attaches: it may not be ready to hear.
        asyncio.get_running_loop().call_soon(self._catch_up)

    def detach(self) -> None:
        self._hear = self._lost = None
        self._came.clear()
        self._end()

    def refuse(self, error: Exception) -> None:
        """End it with a reason that the peer raises, unless it has ended."""
        if self._stream is not None and not self._is_over:
            self._is_over = True
            self._stream.send(to_failure(error))
        self.detach()

    def on_frame(self, frame: Frame, body: bytes) -> None:
        if body:
            raise RemoteProtocolError(f"{type(frame).__name__} with a body")
        if isinstance(frame, Failure):
            self._fail(from_failure(frame))
        elif isinstance(frame, Accepted):
            self._fail(PeerLost("the peer moves nothing more from GPU to GPU"))
        elif isinstance(frame, Devices):
            self._take_description(frame.description)
        elif isinstance(frame, DeviceFrame):
            self._take(frame)
        else:
            raise RemoteProtocolError(f"{type(frame).__name__} makes no sense here")

    def on_lost(self, error: PeerLost) -> None:
        self._fail(error)

    def _take_description(self, description: bytes) -> None:
        if self._answers or self._description.done():
            raise RemoteProtocolError("a Devices that makes no sense")
        self._description.set_result(description)

    def _take(self, frame: DeviceFrame) -> None:
        if self._is_over:
            return
        if self._hear is not None and not self._came:
            self._hear(frame)
        elif len(self._came) == MAX_UNHEARD:
            raise RemoteProtocolError(f"more than {MAX_UNHEARD} frames, unheard")
        else:
            self._came.append(frame)

    def _catch_up(self) -> None:
        while self._came and self._hear is not None:
            self._hear(self._came.popleft())
        if self._error is not None and self._lost is not None:
            self._lost(self._error)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._is_over = True
        if not self._description.done():
            self._description.set_exception(error)
            self._description.exception()  # whoever waits hears of it; else nobody
        if self._lost is not None:
            self._lost(error)

    def _end(self) -> None:
        if self._is_over or self._stream is None:
            return
        self._is_over = True
        if self._answers:
            self._stream.send(Accepted())
        else:
            self._stream.close()


def ask_devices(link: Link, transport: PayloadTransport) -> DeviceStream:
    """Ask the peer for its transport's description; return the channel. Never waits.

    :raises PeerLost: the link is over
    """
    channel = DeviceStream(answers=False)
    channel.use(link.open_stream(channel, OpenDevices(transport.describe())))
    return channel


async def open_devices(link: Link, transport: PayloadTransport) -> DeviceStream:
    """Open ``transport`` with the peer's by a stream of ``link``; return its channel.

    Cancelled, or if that fails, the transport has ended.

    :raises PeerLost: the link ended, or the GPUs' pipes cannot be opened
    :raises IncompatiblePeer: the GPUs do not go together
    """
    channel = ask_devices(link, transport)
    try:
        await transport.open(await channel.description(), channel)
    except BaseException:
        transport.abort()
        channel.detach()
        raise
    return channel
