"""The receiving half of a transfer: bytes by payload, their digests by control.

A part counts when its bytes have landed, the peer has said that they are sent, and the
digests agree. Small parts come eagerly, in the frame that has their digests. Those for
a GPU come from the peer's GPU where a route leads there, else by the link: through host
memory. What such a route has lost comes by the link in place; the peer keeps it until
it has been told that all is in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, Final, Protocol

from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import RemoteProtocolError
from asynckv.links.link import OWN_WORK_S, LinkStream, Progress
from asynckv.protocol.frames import Frame
from asynckv.protocol.transfer import EAGER_NBYTES, ReceiveState, Verdict
from asynckv.protocol.transfer_frames import Eager, Grant, Sent
from asynckv.protocol.wire import digest_of
from asynckv.sharing.gpu_channel import RouteLost, other_bytes
from asynckv.tensors.runs import Memory, fill
from asynckv.transfers.targets import DeviceTarget, Target, copy_to_device
from asynckv.waits.waiting import OwnTasks, wait_shielded

__all__ = ("Incoming", "Route", "receive_frame")

_nbytes_of: Final[Callable[[Target], int]] = attrgetter("nbytes")

_PARTS_AT_ONCE: Final = 64
"""So many parts are announced to the lanes before others have their turn."""


class Route(Protocol):
    """How the parts of one transfer come, if not by the link.

    What it tells was compared. Its errors are :exc:`RouteLost` where the route itself
    was lost: then all that it was to bring is told so.
    """

    @property
    def progress(self) -> Progress:
        """Watches what is to come."""

    @property
    def is_to_gpu(self) -> bool:
        """Do they come to a GPU of this side, or to memory of its host?"""

    @property
    def reads_peer(self) -> bool:
        """Does this side read in memory of the peer, which keeps it until told?"""

    @property
    def is_given_up(self) -> bool:
        """May a GPU write for ever where something was to land?"""

    def grant(self, transfer: int) -> Grant | None:
        """Return what the peer is told once :meth:`receive` was called, if anything."""

    def receive(
        self,
        transfer: int,
        part: int,
        target: Memory | DeviceMemory,
        done: Callable[[bytes, BaseException | None], None],
    ) -> None:
        """Let the bytes of one part land in ``target``. Never waits."""

    def sent(self, frame: Sent) -> None:
        """The peer has sent a part by it, or says where it lies.

        :raises RemoteProtocolError: it makes no sense
        """

    def landed_bytes(self, transfer: int) -> int:
        """Return how many bytes have landed of parts that are not whole yet."""

    def stop(self, transfer: int) -> None:
        """Let nothing more land. Never waits."""

    async def quiesce(self, transfer: int) -> None:
        """Wait until nothing touches memory of the stopped transfer."""


class Incoming:
    """One transfer on its way into ``targets``, once it is granted.

    ``landed`` is called with the number of each part that is where it belongs, and its
    digest; ``failed`` once, with why not all of them will be. Both are forgotten when
    there is nothing more to tell: whoever keeps this object keeps no memory by it.

    ``route`` returns by what large parts can come, if not by the link; it is taken if
    all of them belong where it leads. ``room`` waits for what memory of the host is
    needed where that is lost. If the peer ``confirms`` what comes so, a part is told
    when the peer has said that it knows that it was verified. If not ``is_eager``, even
    small parts come by payload.
    """

    def __init__(
        self,
        stream: LinkStream,
        transfer: int,
        targets: Sequence[Target],
        landed: Callable[[int, bytes], None],
        failed: Callable[[Exception], None] | None = None,
        *,
        route: Callable[[], Route | None] | None = None,
        confirms: bool = False,
        is_eager: bool = True,
        room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.transfer = transfer
        self._stream = stream
        self._link = stream.link
        self._targets = targets
        self._landed: Callable[[int, bytes], None] | None = landed
        self._failed = failed
        self._find_route = route
        self._room = room
        self._state = ReceiveState(
            transfer,
            [*map(_nbytes_of, targets)],
            max_eager_nbytes=EAGER_NBYTES if is_eager else -1,
            confirms=confirms,
        )
        self._unreported = len(targets)
        self._whole: asyncio.Future[None] | None = None
        self._eager: dict[int, Memory] = {}
        self._is_due = self._is_expected = False
        # What belongs on a GPU.
        self._on_device: dict[int, DeviceTarget] = {}
        self._tasks: OwnTasks | None = None
        self._to_copy = list[int]()
        self._copying_since_s: float | None = None
        # What comes from another GPU.
        self._route: Route | None = None
        self._routed: dict[int, Target] = {}
        self._is_route_expected = self._was_quiet = False

    async def receive(self) -> None:
        """Grant it, and wait until all parts are where they belong.

        However this ends, nothing touches the memory any more (at most 1 s).

        :raises ChecksumError: other bytes came than were sent
        :raises GPUFailed: the GPU failed, or may write for ever where they belong
        """
        self._whole = self._link.loop.create_future()
        try:
            self.grant()
            await self._whole
        finally:
            self._whole = None  # else an error and its traceback would keep each other
            await self.quiesce()

    def grant(self, *, whole: bool = True) -> None:
        """Let bytes land, and tell the peer so. Never waits.

        If ``whole``, all of them are there to be sent: see :meth:`expect`.
        """
        state = self._state
        find = self._find_route
        self._route = route = None if find is None else self._choose_route(find)
        # From here on they are the transport's alone: it may be wanted back.
        targets, self._targets = self._targets, ()
        for part, target in enumerate(targets):
            if isinstance(target, DeviceTarget):
                self._on_device[part] = target
        for part in state.eager:
            self._eager[part] = targets[part].host()
        self._is_due = self._is_due or whole
        if route is None:
            large = iter([(part, targets[part]) for part in state.large])
            self._receive_some(state.grant(), large)
            return
        frame = route.grant(self.transfer)
        state.grant("cuda_ipc" if frame is None else frame.route)
        self._routed = {part: targets[part] for part in state.large}
        self._receive_routed(route)
        if frame is not None:
            self._stream.send(frame)
        if whole:
            self.expect()

    def take(self, piece: memoryview, digest: bytes) -> None:
        """Let the one part be what has come with a frame, verified. Never waits."""
        ((part, target),) = enumerate(self._targets)
        self._targets = ()
        if isinstance(target, DeviceTarget):
            self._on_device[part] = target
        fill(target.host(), piece)
        self._act(part, self._state.compare(part, digest, digest))

    def expect(self) -> None:
        """From here on bytes that do not come end the link, or lose their route."""
        self._is_due = True
        state = self._state
        if state.is_stopped:
            return
        if not self._is_expected and (state.landing or state.eager):
            self._is_expected = True
            self._link.progress.expect(self.transfer)
        route, was_expected = self._route, self._is_route_expected
        if state.routed and route is not None and not was_expected:
            self._is_route_expected = True
            route.progress.expect(self.transfer)

    def on_frame(self, frame: Frame, body: bytes) -> None:
        """The peer has sent some of it.

        :raises RemoteProtocolError: it makes no sense
        """
        if isinstance(frame, Sent):
            verdict = self._state.on_sent(frame)
            if verdict == "read" and self._route is not None:
                self._route.sent(frame)
            elif verdict != "waits":
                self._act(frame.part, verdict)
        elif isinstance(frame, Eager):
            self._on_eager(frame, body)
        else:
            raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")

    @property
    def has_come(self) -> bool:
        """Has the peer no more to do for it?"""
        return self._state.has_come

    @property
    def landed_bytes(self) -> int:
        """How many bytes have landed of parts that are not whole yet."""
        nbytes = self._link.payload.landed_bytes(self.transfer)
        if self._route is not None:
            nbytes += self._route.landed_bytes(self.transfer)
        return nbytes

    @property
    def is_working(self) -> bool:
        """Is it this side that copies, or digests, now (at most ``OWN_WORK_S``)?"""
        since_s, route = self._copying_since_s, self._route
        if since_s is not None and self._link.loop.time() - since_s < OWN_WORK_S:
            return True
        return route is not None and route.progress.is_working(self.transfer)

    @property
    def reads_peer(self) -> bool:
        """Does the peer keep what is read there until it is told otherwise?"""
        return self._route is not None and self._route.reads_peer

    @property
    def is_given_up(self) -> bool:
        """May a GPU write for ever where it was to land?"""
        route = self._route
        return route is not None and not self._was_quiet and route.is_given_up

    def stop(self) -> None:
        """Let nothing more land. The memory is quiet after :meth:`quiesce`."""
        self._end()
        if self._state.landing:
            self._link.payload.stop(self.transfer)
        if self._route is not None:
            self._route.stop(self.transfer)
        if self._tasks is not None:
            self._tasks.cancel()

    async def quiesce(self) -> None:
        """Stop, and wait until nothing touches the memory (at most 1 s).

        However often the wait is cancelled, it is for all of that.
        """
        self._end()
        waits = list[Coroutine[Any, Any, None]]()
        if self._state.landing:
            waits.append(self._link.payload.quiesce(self.transfer))
        if self._route is not None:
            waits.append(self._route.quiesce(self.transfer))
        if self._tasks is not None:
            waits.append(self._tasks.quiesce())
        if not waits:
            return
        try:
            await wait_shielded(asyncio.gather(*waits, return_exceptions=True))
        finally:
            # If it is given up later, that is no matter.
            self._was_quiet = self._route is not None and not self._route.is_given_up

    def _end(self) -> None:
        """Tell nothing more, and keep nothing."""
        self._state.stop()
        if self._is_expected:
            self._forget_link()
        if self._is_route_expected:
            self._forget_route()
        self._landed = self._failed = self._find_route = self._room = None
        self._targets = ()
        self._eager.clear()
        self._on_device.clear()
        self._routed = {}
        self._to_copy.clear()

    def _fail(self, error: Exception) -> None:
        failed, whole, is_over = self._failed, self._whole, self._state.is_stopped
        self.stop()
        if is_over:
            return
        if failed is not None:
            failed(error)
        if whole is not None and not whole.done():
            whole.set_exception(error)
            whole.exception()  # who waits for it may be cancelled before it is told

    def _act(self, part: int, verdict: Verdict) -> None:
        if verdict == "differs":
            self._fail(other_bytes(part))
            return
        target = self._on_device.get(part)
        if verdict == "verified" and target is not None and target.is_in_host:
            self._copy_soon(part)
        elif verdict == "verified":
            self._notify(part)
        elif verdict == "confirm":
            self._stream.send(Sent(self.transfer, part, route=self._state.route))
        elif target is not None:  # it came once more behind a lost route
            target.take_bounce()

    def _notify(self, part: int) -> None:
        """One part is where it belongs."""
        landed, whole = self._landed, self._whole
        self._unreported -= 1
        if not self._unreported:
            self._landed = self._failed = self._find_route = self._room = None
            self._on_device.clear()
            self._routed = {}
        if landed is not None:
            landed(part, self._state.verified[part])
        if not self._unreported and whole is not None and not whole.done():
            whole.set_result(None)

    # by the link

    def _receive_some(self, grant: Grant, parts: Iterator[tuple[int, Target]]) -> None:
        """Let parts land, and tell the peer when all may: of many not in one go."""
        if self._state.is_stopped:
            return
        some = list(islice(parts, _PARTS_AT_ONCE))
        payload = self._link.payload
        for part, target in some:
            done = partial(self._on_landed, part)
            payload.receive(self.transfer, part, target.host(), done)
        if len(some) == _PARTS_AT_ONCE:
            self._link.loop.call_soon(self._receive_some, grant, parts)
            return
        self._stream.send(grant)
        if self._is_due:
            self.expect()

    def _on_landed(self, part: int, digest: bytes, error: BaseException | None) -> None:
        if error is not None:
            return  # an error of the link's own ends it too, and is told by on_lost
        state = self._state
        verdict = state.landed(part, digest)
        if self._is_expected and not state.landing and not state.eager:
            self._forget_link()
        if verdict != "waits":
            self._act(part, verdict)

    def _on_eager(self, frame: Eager, body: bytes) -> None:
        state = self._state
        if not (parts := state.on_eager(frame, len(body))):
            return
        self._link.progress.note(len(body))
        if self._is_expected and not state.landing and not state.eager:
            self._forget_link()
        view, start = memoryview(body), 0
        is_digested = self._link.digest != "off"
        for part, nbytes, sent in parts:
            if state.is_stopped:
                return
            piece = view[start : start + nbytes]
            start += nbytes
            fill(self._eager.pop(part), piece)
            landed = digest_of(piece) if is_digested else b""
            self._act(part, state.compare(part, landed, sent))

    def _forget_link(self) -> None:
        self._is_expected = False
        self._link.progress.forget(self.transfer)

    # to a GPU, through memory of the host

    def _copy_soon(self, part: int) -> None:
        """Copy what has landed to the GPU, while the rest is on the wire."""
        self._to_copy.append(part)
        if self._copying_since_s is None:
            self._copying_since_s = self._link.loop.time()
            self._start(self._copy, "copy to a GPU")

    async def _copy(self) -> None:
        while parts := self._to_copy:
            self._to_copy = []
            digests = [self._state.verified[part] for part in parts]
            await copy_to_device([self._on_device[part] for part in parts], digests)
            self._copying_since_s = self._link.loop.time()
            for part in parts:
                self._notify(part)
        self._copying_since_s = None

    def _start(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._tasks = self._tasks or OwnTasks(self._fail)
        self._tasks.start(work, f"asynckv: {name}")

    # from another GPU

    def _choose_route(self, find: Callable[[], Route | None]) -> Route | None:
        large = [self._targets[part] for part in self._state.large]
        route = find() if large else None
        if route is None or any(t.is_on_device != route.is_to_gpu for t in large):
            return None
        return route

    def _receive_routed(self, route: Route) -> None:
        for part, target in self._routed.items():
            done = partial(self._on_routed, route, part)
            place = target.device() if target.is_on_device else target.host()
            route.receive(self.transfer, part, place, done)
            del place  # an error's traceback would keep the memory in use

    def _on_routed(
        self,
        route: Route,
        part: int,
        digest: bytes,
        error: BaseException | None,
    ) -> None:
        state = self._state
        if state.is_stopped or state.is_lost:
            return
        if isinstance(error, RouteLost):
            state.lose()
            self._forget_route()
            self._start(partial(self._fall_back, route, error), "fall back to the link")
            return
        if isinstance(error, Exception):
            self._fail(error)
            return
        verdict = state.came(part, digest)
        if not state.routed:
            self._forget_route()
        self._act(part, verdict)

    async def _fall_back(self, route: Route, lost: RouteLost) -> None:
        """Let all come by the link that the route was to bring.

        Also what is here already, which the peer does not know; it is not told again.
        """
        await route.quiesce(self.transfer)
        state, targets = self._state, self._routed
        if route.is_given_up:
            for part, target in targets.items():
                if part not in state.verified:
                    target.give_up(lost)
        self._route = None
        if self._room is not None:
            await self._room()
        self._receive_some(state.grant(), iter(targets.items()))

    def _forget_route(self) -> None:
        if self._is_route_expected and self._route is not None:
            self._is_route_expected = False
            self._route.progress.forget(self.transfer)


def receive_frame(incoming: Incoming | None, frame: Frame, body: bytes) -> None:
    """The peer says something of what it sends.

    :raises RemoteProtocolError: nothing of it was granted yet, or it makes no sense
    """
    if incoming is None:
        raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")
    incoming.on_frame(frame, body)
