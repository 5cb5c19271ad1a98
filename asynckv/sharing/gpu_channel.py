"""One link's payload from GPU to GPU by NCCL, as long as that works.

What fails here ends this way alone: the link goes on, and payload goes through the
memory of the hosts. NCCL has no digests. A part counts as landed when its last byte is
there and what the sender has said of it was computed once more, of what lies in the
memory.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, ClassVar, Final, Self, TypeAlias

from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.names import Device
from asynckv.errors import (
    ChecksumError,
    GPUFailed,
    IncompatiblePeer,
    PeerLost,
    RemoteProtocolError,
)
from asynckv.links.link import Link, LinkStream, Progress
from asynckv.protocol.failures import from_failure, to_failure
from asynckv.protocol.frames import Accepted, Failure, Frame
from asynckv.protocol.handshake import DigestMode, strictest
from asynckv.protocol.transfer_frames import (
    DeviceFrame,
    Devices,
    Grant,
    OpenDevices,
    Sent,
)
from asynckv.tensors.runs import Memory
from asynckv.transports.nccl.connecting import DeviceDescription, check_peer
from asynckv.transports.nccl.directions import NcclSettings
from asynckv.transports.nccl.transport import NcclTransport
from asynckv.transports.nccl.worker import WorkerUse, worker_of
from asynckv.waits.waiting import OwnTasks, wait_shielded

__all__ = (
    "MAX_UNHEARD",
    "DeviceStream",
    "GpuLink",
    "NcclRoute",
    "RouteLost",
    "other_bytes",
)


MAX_UNHEARD = 1024
"""So many frames may come before somebody hears them."""


class DeviceStream:
    """One side of the stream; fits
    :class:`~asynckv.transports.nccl.transport.DeviceChannel`.

    Frames that come before it is attached to are kept, and handed on then. As a
    context: whoever leaves it by an error says so.
    """

    def __init__(self, *, answers: bool) -> None:
        self._answers = answers
        self._stream: LinkStream | None = None
        self._came: collections.deque[DeviceFrame] = collections.deque()
        self._receive: Callable[[DeviceFrame], None] | None = None
        self._lost: Callable[[Exception], None] | None = None
        self._error: Exception | None = None
        self._is_over = False
        loop = asyncio.get_running_loop()
        self._description: asyncio.Future[bytes] = loop.create_future()

    def ask(self, link: Link, description: bytes) -> None:
        """Ask the peer for its transport's description; this is ours. Never waits.

        :raises PeerLost: the link is over
        """
        self._stream = link.open_stream(self, OpenDevices(description))

    @classmethod
    def answer(cls, stream: LinkStream) -> Self:
        """Return the other side of one that the peer has begun."""
        channel = cls(answers=True)
        channel._stream = stream
        return channel

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            self.give_up(error)

    async def description(self) -> bytes:
        """Wait for what the peer says of itself.

        :raises PeerLost: the link ended first
        :raises AsyncKVError: the peer has refused
        """
        return await asyncio.shield(self._description)

    def describe(self, description: bytes) -> None:
        """Say what the asking side waits for, if this one answers. Never waits."""
        if self._answers:
            self.send(Devices(description))

    def send(self, frame: DeviceFrame) -> None:
        if self._stream is not None and not self._is_over:
            self._stream.send(frame)

    def attach(
        self,
        hear: Callable[[DeviceFrame], None],
        lost: Callable[[Exception], None],
    ) -> None:
        self._receive, self._lost = hear, lost
        # Not within whoever attaches: it may not be ready to hear.
        asyncio.get_running_loop().call_soon(self._catch_up)

    def detach(self) -> None:
        self._receive = self._lost = None
        self._came.clear()
        self._end()

    def give_up(self, error: BaseException) -> None:
        """End it, unless it has ended: with a reason that a peer which asked raises."""
        is_told = self._answers and isinstance(error, Exception)
        if is_told and self._stream is not None and not self._is_over:
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
        if self._receive is not None and not self._came:
            self._receive(frame)
        elif len(self._came) == MAX_UNHEARD:
            raise RemoteProtocolError(f"more than {MAX_UNHEARD} frames, unheard")
        else:
            self._came.append(frame)

    def _catch_up(self) -> None:
        while self._came and self._receive is not None:
            self._receive(self._came.popleft())
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


logger = logging.getLogger(__name__)

_OPEN_S: Final = 10.0
_CLOSE_S: Final = 1.0
_LOOK_AGAIN_S: Final = 0.5
_Prepare: TypeAlias = Callable[[], Awaitable[None]]
_SETTINGS: Final = NcclSettings(open_s=_OPEN_S)


class RouteLost(GPUFailed):
    """Payload does not go from GPU to GPU any more, for that link."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"the way from GPU to GPU was lost: {error}")


def other_bytes(part: int) -> ChecksumError:
    """Return what is raised of a part whose digests differ."""
    return ChecksumError(
        f"part {part} arrived with other bytes than were sent",
        hint="the delivery was refused; nothing of it was used",
    )


class GpuLink:
    """The NCCL transport of one link, on this side. Made by :meth:`make`.

    ``digest`` is what this side wants to be compared of what came.
    """

    def __init__(self, link: Link, use: WorkerUse, digest: DigestMode) -> None:
        loop = asyncio.get_running_loop()
        self.link = link
        self.digest: DigestMode = digest
        self.is_open = False
        """Whether deliveries may go this way now."""
        self.transport = NcclTransport(
            *(use.worker, loop, self._on_lost, _SETTINGS, self._peer_finished)
        )
        self.progress = Progress(self.transport, self._stalled)
        self._use = use
        self._opening: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._is_unwanted = False
        self._over: asyncio.Future[None] = loop.create_future()
        self._routes: weakref.WeakSet[NcclRoute] = weakref.WeakSet()

    @classmethod
    async def make(cls, link: Link, device: Device, digest: DigestMode) -> GpuLink:
        """Return one that is not open yet.

        :raises GPUUnavailable: CuPy, NCCL, a driver or that GPU is missing
        :raises GPUFailed: the GPU's worker was given up, or is blocked
        """
        return cls(link, await worker_of(device), digest)

    async def ask(
        self,
        prepare: _Prepare | None = None,
        *,
        is_patient: bool = False,
    ) -> None:
        """Open it with the peer's: wait 10 s for what that says of its GPU, then 10 s.

        If it ``is_patient``, first for as long as the link lives. ``prepare`` is called
        once both GPUs are known to go together. If it fails it is over; cancelled, it
        goes on as :meth:`open` does.

        :raises PeerLost: the link ended, or the GPUs' pipes cannot be opened
        :raises IncompatiblePeer: the GPUs do not go together
        :raises Exception: what the peer has refused it for, or why it is not open
        """
        channel = DeviceStream(answers=False)
        with self._ended_by_errors(channel):
            channel.ask(self.link, self.transport.describe())
            async with asyncio.timeout(None if is_patient else _OPEN_S):
                description = await channel.description()
            await self._open_with(description, channel, prepare)

    async def answer(
        self,
        channel: DeviceStream,
        description: bytes,
        prepare: _Prepare | None = None,
    ) -> None:
        """Open it with the peer's, which has asked and described its own; as above."""
        with self._ended_by_errors(channel):
            await self._open_with(description, channel, prepare)

    @contextlib.contextmanager
    def _ended_by_errors(self, channel: DeviceStream) -> Iterator[None]:
        try:
            yield
        except BaseException as exc:
            if not self.is_opening:  # else it is over with its opening
                self.close()
                channel.give_up(exc)
            raise

    async def _open_with(
        self,
        description: bytes,
        channel: DeviceStream,
        prepare: _Prepare | None,
    ) -> None:
        own = self.transport.describe()
        peer = DeviceDescription.decode(description)
        try:
            check_peer(DeviceDescription.decode(own), peer)
        except IncompatiblePeer:
            channel.describe(own)  # so that the peer finds its own words for it
            raise
        if prepare is not None:
            await prepare()
        channel.describe(own)
        await self.open(self.transport.open(description, channel))

    async def open(self, opening: Coroutine[Any, Any, object]) -> None:
        """Wait for the transport's opening, at most 10 s.

        If that fails it is over. A cancelled call leaves it to go on for as long, and
        to be over then: the peer's worker may wait for this one in a call that nobody
        can end. The link is to be kept meanwhile: see :meth:`call_when_opened`.

        :raises Exception: why it is not open
        """
        loop = asyncio.get_running_loop()
        self._opening = loop.create_task(self._open(opening), name="asynckv: open NCCL")
        try:
            await asyncio.shield(self._opening)
        except asyncio.CancelledError:
            self._is_unwanted = True
            self._opening.add_done_callback(_see)
            if not self.is_opening:
                self.close()
            raise

    @property
    def is_given_up(self) -> bool:
        """Whether its GPU's worker was: it may touch for ever what it was given."""
        return self._use.worker.error is not None

    @property
    def is_opening(self) -> bool:
        """Whether both sides' workers may be about to meet."""
        return self._opening is not None and not self._opening.done()

    def call_when_opened(self, callback: Callable[[], None]) -> None:
        """Call back when it is being opened no more: now, or later."""
        if self._opening is None or self._opening.done():
            callback()
        else:
            self._opening.add_done_callback(lambda _: callback())

    def call_when_closed(self, callback: Callable[[], None]) -> None:
        """Call back once :meth:`closed` would return: now, or later."""
        self._over.add_done_callback(lambda _: callback())

    def expect(self, route: NcclRoute) -> None:
        """Tell ``route``, if it is still there, once nothing more can come."""
        self._routes.add(route)

    async def _open(self, opening: Coroutine[Any, Any, object]) -> None:
        try:
            async with asyncio.timeout(_OPEN_S):
                await opening
        except BaseException:
            self.close()
            raise
        if self._is_unwanted:
            self.close()
            return
        self.is_open = True
        self.link.use_nccl()
        self.link.call_when_lost(self._link_lost)
        logger.info("payload of the link to %s goes by NCCL", self.link.peer.id)

    def close(self) -> asyncio.Task[None]:
        """Move nothing more. Never waits; what is returned waits for the GPU."""
        if self._closing is None:
            self.is_open = False
            self.progress.stop()
            loop = asyncio.get_running_loop()
            self._closing = loop.create_task(self._close(), name="asynckv: close NCCL")
        return self._closing

    async def closed(self) -> None:
        """Wait until it was closed, and the GPU has let go or 1 s is over.

        A cancelled call changes nothing.
        """
        await asyncio.shield(self._over)

    async def aclose(self) -> None:
        """Close it, and wait until the GPU has let go, about 2 s at most. Shielded.

        What is being opened for nobody has 1 s of them; then it closes itself.
        """
        if self._opening is not None:
            await wait_shielded(self._opening, timeout_s=_CLOSE_S)
        if not self.is_opening:
            await wait_shielded(self.close())

    async def _close(self) -> None:
        self.transport.abort()
        try:
            await self.transport.aclose()
        finally:
            self._over.set_result(None)
        self._end_use()

    def _end_use(self) -> None:
        """Leave the worker when it has left this transport: now, or looked at later."""
        if self.transport.is_quiet:
            self._use.end()
        elif self._use.worker.error is None:
            loop = asyncio.get_running_loop()
            loop.call_later(_LOOK_AGAIN_S, self._end_use)

    def _link_lost(self, _: PeerLost) -> None:
        self.close()

    def _stalled(self, error: Exception) -> None:
        self._on_lost(error)

    def _peer_finished(self) -> None:
        """All that was offered has landed; of some the peer may never say so."""
        if any(route.is_awaited for route in self._routes):
            self._on_lost(PeerLost("the peer closed its side"))
        else:
            self.is_open = False
            self.link.use_lanes()

    def _on_lost(self, error: Exception) -> None:
        was_open = self.is_open
        self.close()
        if was_open and self.link.is_open:
            self.link.use_lanes()
            logger.warning(
                "payload of the link to %s goes through host memory from here on: %s",
                self.link.peer.id,
                error,
            )
        # A worker that is blocked lets nobody know for long: nobody waits for it.
        for route in list(self._routes):
            route.fail(RouteLost(error))


def _see(opening: asyncio.Task[None]) -> None:
    """Nobody wants to know how it ended."""
    if not opening.cancelled():
        opening.exception()


_Done = Callable[[bytes, BaseException | None], None]


@dataclasses.dataclass(slots=True)
class _Part:
    transfer: int
    memory: DeviceMemory
    done: _Done
    sent: Sent | None = None
    has_landed: bool = False


class NcclRoute:
    """One transfer; fits :class:`~asynckv.transfers.incoming.Route`.

    ``digest`` is what this side wants to be compared, by default as of all that comes
    by that way.
    """

    is_to_gpu: ClassVar[bool] = True
    reads_peer: ClassVar[bool] = False

    def __init__(
        self, gpus: GpuLink, pool: CopyPool, digest: DigestMode | None = None
    ) -> None:
        self.gpus = gpus
        self.pool = pool
        self.digest: DigestMode = gpus.digest if digest is None else digest
        self._parts: dict[int, _Part] = {}
        self._comparing = OwnTasks()
        self._is_stopped = False
        gpus.expect(self)

    def grant(self, transfer: int) -> Grant:
        """Return what the peer is told once :meth:`receive` was called."""
        return Grant(transfer, "nccl", self.digest)

    @property
    def progress(self) -> Progress:
        """Watches what is to come."""
        return self.gpus.progress

    @property
    def is_given_up(self) -> bool:
        """Whether the GPU's worker was: it may write for ever where it was to."""
        return self.gpus.is_given_up

    @property
    def is_awaited(self) -> bool:
        """Whether the peer has yet to send a part, or to say that it has."""
        return bool(self._parts)

    def receive(
        self, transfer: int, part: int, target: Memory | DeviceMemory, done: _Done
    ) -> None:
        if not isinstance(target, DeviceMemory):
            raise TypeError("memory of the host does not come this way")
        self._parts[part] = _Part(transfer, target, done)

        def landed(_: bytes, error: BaseException | None) -> None:
            if error is not None:
                done(b"", RouteLost(error))
            else:
                self._parts[part].has_landed = True
                self._compare_if_due(part)

        self.gpus.transport.receive(transfer, part, target, landed)

    def sent(self, frame: Sent) -> None:
        """The peer has sent a part, and says what its digest is of.

        :raises RemoteProtocolError: there is no such part, it was sent before, less is
            to be compared than this side asks for, or it only lies there
        """
        if frame.route != "nccl":
            raise RemoteProtocolError(f"sent by {frame.route}, granted otherwise")
        if self._is_stopped:
            return
        part = self._parts.get(frame.part)
        own = self.digest
        if part is None or part.sent is not None:
            raise RemoteProtocolError(
                f"part {frame.part} was sent, which makes no sense"
            )
        if strictest(own, frame.kind) != frame.kind:
            raise RemoteProtocolError(f"digests of {frame.kind}, not of {own}")
        part.sent = frame
        self._compare_if_due(frame.part)

    def landed_bytes(self, transfer: int) -> int:
        """Bytes that have landed of parts that are not whole yet."""
        return self.gpus.transport.landed_bytes(transfer)

    def fail(self, error: RouteLost) -> None:
        """Nothing more comes: whoever waits for a part is told."""
        for part in list(self._parts.values()):
            part.done(b"", error)

    def stop(self, transfer: int) -> None:
        self._is_stopped = True
        self._parts.clear()
        self.gpus.transport.stop(transfer)
        self._comparing.cancel()

    async def quiesce(self, transfer: int) -> None:
        self.stop(transfer)
        try:  # each waits, however often the one before it was cancelled
            await self.gpus.transport.quiesce(transfer)
        finally:
            await self._comparing.quiesce()

    def _compare_if_due(self, number: int) -> None:
        part = self._parts[number]
        if part.sent is None or not part.has_landed:
            return
        del self._parts[number]
        self._comparing.own(self._compare(part, part.sent), "asynckv: digest")

    async def _compare(self, part: _Part, sent: Sent) -> None:
        digest = b""
        try:
            with self.progress.working(part.transfer):
                if sent.kind == "full":
                    (digest,) = await self.pool.digest([part.memory])
                elif sent.kind == "edges":
                    (digest,) = await self.pool.edges([part.memory])
        except Exception as exc:  # noqa: BLE001 - whoever waits is told
            part.done(b"", exc)
        else:
            error = None if digest == sent.digest else other_bytes(sent.part)
            part.done(digest, error)
