"""The sending half of a transfer: what is there leaves, once the peer grants it.

As the peer's memory is: through the link's payload, from GPU to GPU, or not at all,
where the peer reads it in memory of this side's GPU. Small parts are eager: they leave
with a frame. What a GPU has to give to the link's payload is copied to the host, piece
by piece while the last one is on the wire. The peer may grant what it has not verified
once more, by the link's payload; the sources are kept until then.

Which grant counts, and what leaves by it, :class:`SendState` knows.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from asynckv.devices.arena import DeviceRegion
from asynckv.devices.copying import CopyPool
from asynckv.errors import GPUFailed, RemoteProtocolError
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.codec import BODY_PART_BYTES
from asynckv.protocol.handshake import DigestMode, strictest
from asynckv.protocol.transfer import (
    EAGER_NBYTES,
    NEVER_OFFERED,
    STILL_LEAVING,
    SendState,
)
from asynckv.protocol.transfer_frames import (
    MAX_EAGER,
    Eager,
    Grant,
    RouteName,
    Sent,
)
from asynckv.protocol.wire import digest_of
from asynckv.sharing.exporter import Importer
from asynckv.sharing.gpu_channel import GpuLink
from asynckv.tensors.arena import Region
from asynckv.tensors.feeds import Feed
from asynckv.tensors.runs import Memory, joined
from asynckv.transfers.host_copies import D2HCopier, HostCopy
from asynckv.transfers.source import Source
from asynckv.transfers.targets import device_memory
from asynckv.waits.waiting import OwnTasks

__all__ = (
    "EagerParts",
    "GpuImporter",
    "Outgoing",
    "Routes",
    "ignore_grant",
)

_Parts: TypeAlias = Sequence[tuple[int, Source]]


@dataclasses.dataclass(frozen=True, slots=True)
class GpuImporter:
    """Who reads memory of this side's GPU, and what digests it here."""

    importer: Importer
    pool: CopyPool


class Routes(Protocol):
    """Whoever knows how what is on its GPU gets to a peer."""

    def d2h(self, link: Link) -> D2HCopier:
        """Return what brings it to the host, for the link's payload."""

    def nccl(self, link: Link) -> GpuLink | None:
        """Return what leads from GPU to GPU there, while it does.

        :raises RemoteProtocolError: nothing ever did
        """


_TICK_BYTES: Final = 256 * 1024
"""So much is digested and copied on the loop before others have their turn."""

_BUSY_BYTES: Final = 2**20

_PARTS_AT_ONCE: Final = 64
"""So many parts are given to the lanes before others have their turn on the loop."""

_Part: TypeAlias = tuple[int, int, Callable[[], memoryview], bytes | None]


class EagerParts:
    """The small parts of one transfer that have not left yet.

    Their memory is read on the loop, until :meth:`stop`.
    """

    def __init__(self, link: Link, stream: LinkStream, transfer: int) -> None:
        self._link = link
        self._stream = stream
        self._transfer = transfer
        self._loop = asyncio.get_running_loop()
        self._parts: collections.deque[_Part] = collections.deque()
        self._is_due = False

    def add(
        self,
        index: int,
        nbytes: int,
        read: Callable[[], memoryview],
        digest: bytes | None = None,
    ) -> None:
        """Let a part of so many bytes leave soon. They are read when it does.

        ``digest`` is its own where that is known already.
        """
        self._parts.append((index, nbytes, read, digest))
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._go)

    @property
    def are_queued(self) -> bool:
        """Are there any that have not left yet?"""
        return bool(self._parts)

    def stop(self) -> None:
        """Send no more of them: their memory is not read any more."""
        self._parts.clear()

    def _go(self) -> None:
        self._is_due = False
        left_bytes = _TICK_BYTES
        while self._parts and left_bytes > 0:
            left_bytes -= self._send_some()
        if not self._parts:
            return
        self._is_due = True
        if self._link.outgoing_bytes > _BUSY_BYTES:
            self._link.call_when_drained(self._go)
        else:
            self._loop.call_soon(self._go)

    def _send_some(self) -> int:
        """Send what fits in a frame; return how many bytes that were."""
        parts = self._parts
        numbers, digests, sources = list[int](), list[bytes](), list[memoryview]()
        is_digested = self._link.digest != "off"
        total = 0
        while parts and len(numbers) < MAX_EAGER:
            index, nbytes, read, digest = parts[0]
            if total + nbytes > BODY_PART_BYTES:
                break
            parts.popleft()
            total += nbytes
            source = read()
            numbers.append(index)
            sources.append(source)
            if is_digested:
                digests.append(digest or digest_of(source))
        frame = Eager(self._transfer, tuple(numbers), tuple(digests))
        self._stream.send(frame, b"".join(sources))
        return total + 1


def ignore_grant(frame: Grant, link: Link) -> None:
    """Nothing stands that this could grant: it has crossed the end of what did.

    :raises RemoteProtocolError: it was never offered
    """
    if not link.has_numbered(frame.transfer):
        raise RemoteProtocolError(NEVER_OFFERED)


class Outgoing:
    """One transfer to the other end of ``stream``, from the moment it is offered.

    Its parts stay untouched until :meth:`quiesce` has ended. With ``is_on_gpu`` the
    offer has said that NCCL may send them, and ``exported`` is who reads them where
    they lie; ``importer`` returns who else may. ``failed(error)`` is called when one
    cannot leave. ``sent`` is given what is to be said of one that the link's payload
    has sent, by default to the peer. Its tasks are also ``within`` others.
    """

    __slots__ = (
        "_copier",
        "_eager",
        "_exported",
        "_failed",
        "_importer",
        "_in_lanes",
        "_link",
        "_nccl",
        "_pin",
        "_queue",
        "_routes",
        "_send",
        "_sent",
        "_sources",
        "_state",
        "_stream",
        "_tasks",
        "_within",
        "transfer",
    )

    def __init__(
        self,
        stream: LinkStream,
        transfer: int,
        routes: Routes | None = None,
        *,
        failed: Callable[[Exception], None],
        is_on_gpu: bool = False,
        exported: Importer | None = None,
        importer: Callable[[Link], GpuImporter | None] | None = None,
        sent: Callable[[Sent], None] | None = None,
        within: OwnTasks | None = None,
    ) -> None:
        self.transfer = transfer
        self._stream = stream
        self._link = stream.link
        self._routes = routes
        self._failed = failed
        self._exported = exported
        self._importer = importer
        self._sent: Callable[[Sent], None] = sent or stream.send
        self._within = within
        self._tasks: OwnTasks | None = None
        self._sources = dict[int, Source]()
        self._send: Callable[[_Parts], None] = self._send_by_link
        self._eager: EagerParts | None = None
        self._copier: D2HCopier | None = None
        self._in_lanes = 0
        self._queue: collections.deque[tuple[int, Source]] = collections.deque()
        self._nccl: GpuLink | None = None
        self._pin: tuple[Importer, int] | None = None
        offered: list[RouteName] = ["link"]
        if is_on_gpu and routes is not None:
            offered.append("nccl")
        if exported is not None or importer is not None:
            offered.append("cuda_ipc")
        self._state = SendState(transfer, offered)

    @property
    def is_busy(self) -> bool:
        """Whether anything may still read the sources."""
        return bool(self._in_lanes or self._tasks or self._queue)

    @property
    def is_read(self) -> bool:
        """Whether the peer may read on this side's GPU what it was told of."""
        return self._pin is not None

    def add(self, part: int, source: Source) -> None:
        """One more part is there: it leaves now, or when it is granted. Never waits."""
        self._sources[part] = source
        if self._state.add(part):
            self._send([(part, source)])

    def on_grant(self, frame: Grant) -> None:
        """The peer's memory is ready: send what is there. Never waits.

        If this side's route is over, the peer will hear of that, and grant it again.

        :raises RemoteProtocolError: as :meth:`SendState.on_grant`, or nothing ever led
            there
        """
        state = self._state
        is_anew, is_by_link = state.is_granted, state.route == "link"
        if (parts := state.on_grant(frame)) is None:
            return
        if is_anew:  # what is queued for the lanes would mix with what leaves now
            if is_by_link and self._eager is not None and self._eager.are_queued:
                raise RemoteProtocolError(STILL_LEAVING)
            self._halt()
            self.release()
        self._send = self._route(frame)
        sources = map(self._sources.__getitem__, parts)
        self._send([*zip(parts, sources, strict=True)])

    def pin(self, importer: Importer, regions: Sequence[Region]) -> None:
        """Let the peer read there, until :meth:`release`. Never waits."""
        self._pin = importer, importer.pin(regions).number

    def release(self) -> None:
        """The peer reads nothing of it any more: it has said so. Never waits."""
        pin, self._pin = self._pin, None
        if pin is not None:
            importer, number = pin
            importer.unpin(number)

    def stop(self) -> None:
        """Send no more: the peer has all, or needs no more. Never waits."""
        self._state.stop()
        self._halt()
        if self._eager is not None:
            self._eager.stop()
        self._sources = {}  # whoever keeps this object keeps no memory

    async def quiesce(self) -> None:
        """Stop, and wait until no thread reads the sources (shielded).

        At most 1 s. A GPU may still read what is staged: that is kept for it.
        """
        self.stop()
        try:  # each waits, however often the one before it was cancelled
            if self._tasks is not None:
                await self._tasks.quiesce()
        finally:
            if self._in_lanes:
                await self._link.payload.quiesce(self.transfer)

    def _halt(self) -> None:
        nccl, self._nccl = self._nccl, None
        self._queue.clear()
        if nccl is not None:
            nccl.transport.stop(self.transfer)
        if self._in_lanes:
            self._link.payload.stop(self.transfer)
        if self._tasks is not None:
            self._tasks.cancel()

    def _route(self, frame: Grant) -> Callable[[_Parts], None]:
        digest = frame.digest
        if frame.route == "nccl" and self._routes is not None:
            return partial(self._send_by_nccl, digest, self._routes.nccl(self._link))
        if frame.route == "cuda_ipc" and (exported := self._exported) is not None:
            kind = strictest(exported.exposed.digest, digest)
            return partial(self._notify, kind, exported)
        if frame.route == "cuda_ipc" and self._importer is not None:
            return partial(self._export, digest, self._importer(self._link))
        return self._send_by_link

    def _send_by_link(self, parts: _Parts) -> None:
        """Let parts leave: of many some now, the others in the loop's next turns."""
        is_under_way = bool(self._queue)
        self._queue.extend(parts)
        if not is_under_way:
            self._send_some()

    def _send_some(self) -> None:
        for _ in range(min(_PARTS_AT_ONCE, len(self._queue))):
            part, source = self._queue.popleft()
            if source.is_on_gpu:
                self._copy_to_host(part, source)
            elif source.nbytes <= EAGER_NBYTES:
                read = partial(_read, source)
                self._send_eagerly(part, source, read)
            else:
                self._send_in_lanes(part, source.host(), source.digest)
        if self._queue:
            self._link.loop.call_soon(self._send_some)

    def _copy_to_host(self, part: int, source: Source) -> None:
        """Bring a part to the host, to be sent from there."""
        copier = self._d2h()

        def copied(copy: HostCopy) -> None:
            if isinstance(copy, memoryview) and copy.nbytes <= EAGER_NBYTES:
                self._send_eagerly(part, source, lambda: copy)
            else:
                self._send_in_lanes(part, copy, source.digest)

        self._start(partial(copier.copy, source, copied))

    def _send_eagerly(
        self, part: int, source: Source, read: Callable[[], memoryview]
    ) -> None:
        if self._eager is None:
            self._eager = EagerParts(self._link, self._stream, self.transfer)
        self._state.left(part)
        self._eager.add(part, source.nbytes, read, source.digest or None)

    def _send_in_lanes(self, part: int, memory: Memory | Feed, digest: bytes) -> None:
        payload, known = self._link.payload, digest or None

        def done(digest: bytes, error: BaseException | None) -> None:
            self._in_lanes -= 1
            sent = self._state.sent(part, digest)
            if sent is not None and error is None:  # else the link ends
                self._sent(sent)

        self._in_lanes += 1
        if isinstance(memory, Feed):
            payload.feed(self.transfer, part, memory, done, digest=known)
        else:
            payload.send(self.transfer, part, memory, done, digest=known)

    def _send_by_nccl(
        self, kind: DigestMode, nccl: GpuLink | None, parts: _Parts
    ) -> None:
        self._nccl = nccl
        for part, source in parts:
            if source.nbytes <= EAGER_NBYTES:
                self._send_by_link([(part, source)])
            elif nccl is not None:
                place = device_memory(source.region, source.spec)
                both = strictest(nccl.digest, kind)
                sent = partial(self._sent_by_nccl, both, part, source)
                nccl.transport.send(self.transfer, part, place, sent)

    def _sent_by_nccl(
        self,
        kind: DigestMode,
        part: int,
        source: Source,
        _: bytes,
        error: BaseException | None,
    ) -> None:
        if error is None:  # else the peer hears that the route is lost
            self._say_sent(kind, part, source)

    def _notify(self, kind: DigestMode, importer: Importer, parts: _Parts) -> None:
        """Say of each part that it lies where the peer was told that it would."""
        for part, source in parts:
            if source.nbytes <= EAGER_NBYTES:
                self._send_by_link([(part, source)])
            elif importer.is_connected:
                self._say_sent(kind, part, source)
            else:  # what it would read there may be another's by now
                self._failed(
                    GPUFailed(
                        "the peer has closed the memory that it was shown: what it "
                        "asks for from here on goes through host memory"
                    )
                )
                return

    def _say_sent(self, kind: DigestMode, part: int, source: Source) -> None:
        if (known := _known(kind, source)) is not None:
            self._say(self._state.sent(part, *known))
        else:
            self._start(partial(self._digest_sent, part, source))

    async def _digest_sent(self, part: int, source: Source) -> None:
        digest = await self._d2h().digest(source)
        self._say(self._state.sent(part, digest))

    def _say(self, sent: Sent | None) -> None:
        if sent is not None:
            self._stream.send(sent)

    def _export(
        self, kind: DigestMode, importer: GpuImporter | None, parts: _Parts
    ) -> None:
        """Say where each part lies that the peer reads; or only that one does not.

        All are pinned before the reader is told of one: only its word, or the end of
        what it has open, lets the memory be another's.
        """
        large, regions = list[tuple[int, Source, int]](), list[DeviceRegion]()
        for part, source in parts:
            region = source.region
            if source.nbytes <= EAGER_NBYTES:
                self._send_by_link([(part, source)])
            elif importer is None or not isinstance(region, DeviceRegion):
                self._say(self._state.sent(part, b"", "off"))
                return
            else:
                regions.append(region)
                large.append((part, source, region.start))
        if importer is not None and large:
            self.pin(importer.importer, regions)
            self._start(partial(self._digest_exported, kind, importer.pool, large))

    async def _digest_exported(
        self,
        kind: DigestMode,
        pool: CopyPool,
        parts: Sequence[tuple[int, Source, int]],
    ) -> None:
        unknown = [one for _, one, _ in parts if _known(kind, one) is None]
        edges = iter(list[bytes]())
        if kind == "edges" and unknown:
            places = [device_memory(one.region, one.spec) for one in unknown]
            edges = iter(await pool.edges(places))
        for part, source, offset in parts:
            if (known := _known(kind, source)) is not None:
                digest, said = known
            elif kind == "edges":
                digest, said = next(edges), kind
            else:
                (digest,), said = await pool.digest([source.place()]), "full"
            self._say(self._state.sent(part, digest, said, offset))

    def _d2h(self) -> D2HCopier:
        if self._routes is None:
            raise TypeError("nothing reads this side's GPU")
        self._copier = copier = self._copier or self._routes.d2h(self._link)
        return copier

    def _start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._tasks is None:
            self._tasks = OwnTasks(self._failed, within=self._within)
        self._tasks.start(work, f"asynckv: transfer {self.transfer}")


def _read(source: Source) -> memoryview:
    return joined(source.host())


def _known(kind: DigestMode, source: Source) -> tuple[bytes, DigestMode] | None:
    """Return what can be said of a part at once, to a peer that asks for ``kind``.

    A digest of all bytes says more than one of the edges, which is read in less time.
    """
    region = source.region
    if kind == "off":
        return b"", "off"
    if kind == "edges" and isinstance(region, DeviceRegion) and region.edges:
        return region.edges, "edges"
    return (source.digest, "full") if source.digest else None
