"""The parts of one transfer that leave for a peer's buffer, once it grants them.

As the peer's memory is: by the link's payload, or from GPU to GPU, be they in host
memory or on this side's GPU; what is small rides. Plain functions; tasks read back what
a GPU has, piece by piece while the last one is on the wire. What left from GPU to GPU
may be asked for once more by the link's payload, until the peer says that it has
verified it: the sources are kept until then. What the buffer's side reads where this
side has staged it is pinned before the reader is told of it: only its word, or the end
of what it has open, lets the memory be another's.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from asynckv.errors import RemoteProtocolError
from asynckv.links.gpu_link import GpuLink
from asynckv.links.link import Link
from asynckv.links.own_tasks import OwnTasks
from asynckv.links.requests import LinkStream
from asynckv.protocol.handshake import DigestMode, strictest
from asynckv.protocol.transfer_frames import (
    GrantDevices,
    GrantShared,
    SentDevices,
    SentShared,
)
from asynckv.sharing.owner import MapHolder
from asynckv.tensors.arena import Region
from asynckv.tensors.blocks import memory_of
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.device_regions import DeviceRegion
from asynckv.tensors.feeds import Feed
from asynckv.tensors.on_gpu import KVOnGpu
from asynckv.tensors.runs import Memory, joined
from asynckv.transfers.eager import RidingParts, rides
from asynckv.transfers.host_copies import Hoisting, HostCopies, HostCopy
from asynckv.transfers.staging import (
    Source,
    SourceOnGpu,
    StagedTensor,
    are_staged,
    places_of,
)
from asynckv.types import TensorSpec

__all__ = (
    "DigestPart",
    "GpuSending",
    "LeavingParts",
    "OutwardWays",
    "ShownParts",
    "ShownTo",
    "Telling",
)


@dataclasses.dataclass(frozen=True, slots=True)
class ShownTo:
    """Who reads memory of this side's GPU, and what digests it here."""

    holder: MapHolder
    pool: DeviceCopyPool


_Staged: TypeAlias = tuple[int, StagedTensor, bytes]


class ShownParts:
    """Each of ``parts`` with its number, and with its digest where that is known.

    ``shown`` is who reads them, if anybody does; ``tell`` sends what is said of each.
    """

    def __init__(
        self,
        transfer: int,
        parts: Sequence[tuple[int, Source, bytes | None]],
        shown: ShownTo | None,
        tell: Callable[[SentShared], None],
    ) -> None:
        self._transfer = transfer
        self._parts = parts
        self._shown = shown
        self._tell = tell
        self._pin: int | None = None

    @property
    def are_read(self) -> bool:
        """Whether the reader may be at them."""
        return self._pin is not None

    async def show(self, kind: DigestMode) -> None:
        """Say where each lies, with a digest of that ``kind`` or of all its bytes.

        If one of them is not there, only that. A cancelled call ends when nothing reads
        them on this side.

        :raises GPUFailed: the GPU failed
        """
        shown, staged, edges = self._shown, list[_Staged](), iter(list[bytes]())
        if shown is not None and not shown.holder.is_usable:
            shown = None  # nobody would ever say that he is through with it
        for index, source, digest in self._parts:
            if shown is None or not isinstance(source, StagedTensor):
                self._tell(SentShared(self._transfer, index, "off"))
                return
            staged.append((index, source, digest or b""))
        if shown is None:
            return
        self._pin = shown.holder.pin([source.region for _, source, _ in staged]).number
        if kind == "edges":
            unknown = [source for _, source, digest in staged if not digest]
            edges = iter(await shown.pool.edges([one.place() for one in unknown]))
        for index, source, digest in staged:
            said: DigestMode = "full" if digest else kind
            if not digest and kind == "edges":
                digest = next(edges)
            elif not digest and kind == "full":
                (digest,) = await shown.pool.digest(places_of([source]))
            offset = source.region.start
            self._tell(SentShared(self._transfer, index, said, offset, digest))

    def let_go(self) -> None:
        """The reader is through with all of them. Never waits."""
        shown, self._shown = self._shown, None
        pin, self._pin = self._pin, None
        if pin is not None and shown is not None:
            shown.holder.unpin(pin)


class OutwardWays(Protocol):
    """Whoever knows what leads from its GPU to those of its peers."""

    pool: CopyPool

    @property
    def copies(self) -> HostCopies:
        """Memory of the host for what goes from a GPU another way."""

    def way(self, link: Link) -> GpuLink | None:
        """Return what does, while it does."""

    def shown(self, link: Link) -> ShownTo | None:
        """Return who reads in memory of its GPU there, while somebody does."""


class LeavingParts:
    """They stay untouched until :meth:`quiesce` has ended.

    ``digests`` are theirs where they are known already. ``left(index, digest, error)``
    is called when the last byte of one has left by the link's payload, which is to be
    told, or could not; ``failed(error)`` when one cannot be read back from the GPU.
    """

    def __init__(
        self,
        stream: LinkStream,
        transfer: int,
        sources: Sequence[Source],
        digests: Sequence[bytes] | None,
        ways: OutwardWays | None,
        *,
        left: Callable[[int, bytes, BaseException | None], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._link = stream.link
        self._stream = stream
        self._transfer = transfer
        self._sources = sources
        self._digests = digests
        self._ways = ways
        self._left = left
        self._riding: RidingParts | None = None
        self._is_by_gpu = False
        self._way: GpuLink | None = None
        self._shown: ShownParts | None = None
        self._name = f"asynckv: transfer {transfer} to a buffer"
        self._tasks = OwnTasks(failed)
        self._is_by_link = False
        self._is_stopped = False

    @property
    def is_busy(self) -> bool:
        """Whether a task may still read the sources."""
        return len(self._tasks) > 0

    def on_grant(self) -> None:
        """Send all by the link's payload: once more what left before.

        So it is granted again what was given back on its way past the buffer.
        """
        if self._is_stopped:
            return
        if not self._is_by_gpu:
            self._ride()
        self._leave_way()
        self.let_go()
        hoisted = list[tuple[int, StagedTensor | KVOnGpu]]()
        for index, source in self._large():
            if isinstance(source, StagedTensor | KVOnGpu):
                hoisted.append((index, source))
            else:
                self._send_by_link(index, memory_of(source))
        if hoisted and (ways := self._ways) is not None:
            feeds = self._link.payload.feeds
            hoisting = Hoisting(ways.pool, ways.copies, feeds)
            for index, there in hoisted:
                self._hoist(hoisting, there, partial(self._send_by_link, index))

    def on_grant_devices(self, frame: GrantDevices) -> None:
        """Send all from GPU to GPU.

        If this side's way is over, the peer will hear of that, and grant it again.

        :raises RemoteProtocolError: nothing ever led there, some of it is not on this
            side's GPU, or it was granted before
        """
        if self._is_stopped:
            return
        ways = self._ways
        if ways is None or self._is_by_gpu or not are_staged(self._sources):
            raise RemoteProtocolError("a grant of memory that nothing leads to")
        self._ride()
        self._is_by_gpu = True
        self._way = way = ways.way(self._link)
        if way is None:
            return
        is_off = strictest(way.digest, frame.kind) == "off"
        kind: DigestMode = "off" if is_off else "full"
        for index, source in self._large():
            if isinstance(source, StagedTensor):
                self._send_by_gpu(way, kind, index, source)

    def on_grant_shared(self, frame: GrantShared) -> None:
        """Say where all lies that the peer reads; or that it does not.

        What is not in memory that the peer has open it will grant again.

        :raises RemoteProtocolError: this side has no GPU, or it was granted before
        """
        if self._ways is None or self._is_by_gpu:
            raise RemoteProtocolError("a grant of what was never shown")
        if self._is_stopped:
            return
        self._ride()
        self._is_by_gpu = True
        parts = [(index, one, self._known(index)) for index, one in self._large()]
        shown = self._ways.shown(self._link)
        self._shown = ShownParts(self._transfer, parts, shown, self._stream.send)
        self._tasks.start(partial(self._shown.show, frame.kind), self._name)

    @property
    def is_read(self) -> bool:
        """Whether the peer may read on this side's GPU."""
        return self._shown is not None and self._shown.are_read

    def let_go(self) -> None:
        """The peer reads nothing of it any more: it has said so. Never waits."""
        if self._shown is not None:
            self._shown.let_go()

    def stop(self) -> None:
        """Send no more. Never waits."""
        self._link.payload.stop(self._transfer)
        self.end()

    def end(self) -> None:
        """The peer has all, or needs no more. Never waits."""
        self._is_stopped = True
        if self._riding is not None:
            self._riding.stop()
        self._leave_way()
        self._sources = ()  # whoever keeps this object keeps no memory

    async def quiesce(self) -> None:
        """Stop, and wait until no thread reads the sources (shielded).

        At most 1 s. A GPU may still read what is staged: that is kept for it.
        """
        self.stop()
        try:  # each waits, however often the one before it was cancelled
            await self._tasks.quiesce()
        finally:
            await self._link.payload.quiesce(self._transfer)

    def _large(self) -> list[tuple[int, Source]]:
        every = enumerate(self._sources)
        return [(index, source) for index, source in every if not rides(source.nbytes)]

    def _ride(self) -> None:
        """Let small parts leave: once each time that all are asked for."""
        if self._riding is not None:
            self._riding.stop()
        riding = RidingParts(self._link, self._stream, self._transfer)
        for index, source in enumerate(self._sources):
            if isinstance(source, StagedTensor | KVOnGpu):
                continue  # too long, as it is there
            if rides(source.nbytes):
                read = partial(joined, memory_of(source))
                riding.add(index, source.nbytes, read, self._known(index))
        self._riding = riding

    def _leave_way(self) -> None:
        way, self._way, self._is_by_gpu = self._way, None, False
        if way is not None:
            way.transport.stop(self._transfer)
        if self._is_by_link:  # what still waits would mix with what is sent anew
            self._is_by_link = False
            self._link.payload.stop(self._transfer)
        self._tasks.cancel()

    def _known(self, index: int) -> bytes | None:
        return None if self._digests is None else self._digests[index]

    def _send_by_link(self, index: int, memory: Memory | Feed) -> None:
        sent, digest = partial(self._sent, index), self._known(index)
        payload, self._is_by_link = self._link.payload, True
        if isinstance(memory, Feed):
            payload.feed(self._transfer, index, memory, sent, digest=digest)
        else:
            payload.send(self._transfer, index, memory, sent, digest=digest)

    def _sent(self, index: int, digest: bytes, error: BaseException | None) -> None:
        if not self._is_stopped:
            self._left(index, digest, error)

    def _send_by_gpu(
        self, way: GpuLink, kind: DigestMode, index: int, source: StagedTensor
    ) -> None:
        telling = partial(self._tell_sent, kind, index, source)

        def sent(_: bytes, error: BaseException | None) -> None:
            if error is None and self._way is way:  # else it is asked for again
                self._tasks.start(telling, self._name)

        way.transport.send(self._transfer, index, source.place(), sent)

    async def _tell_sent(self, kind: DigestMode, index: int, source: Source) -> None:
        digest = b""
        if kind == "full" and self._ways is not None:
            digest = self._known(index) or b""
            if not digest:
                (digest,) = await self._ways.pool.digest(places_of([source]))
        self._stream.send(SentDevices(self._transfer, index, kind, digest))

    def _hoist(
        self,
        hoisting: Hoisting,
        source: StagedTensor | KVOnGpu,
        copied: Callable[[HostCopy], None],
    ) -> None:
        """Bring what is on a GPU to the host, for whoever sends it from there."""
        there, spec = SourceOnGpu(source), source.spec
        self._tasks.start(partial(hoisting.copy, there, spec, copied), self._name)


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


class GpuSending:
    """One transfer that the peer has granted memory of its GPU. Nothing here waits."""

    def __init__(
        self,
        way: GpuLink,
        stream: LinkStream,
        granted: GrantDevices,
        digest_part: DigestPart,
    ) -> None:
        self._transport = way.transport
        self._transfer = granted.transfer
        kind = strictest(way.digest, granted.kind)
        self._telling = Telling(stream, granted.transfer, kind, digest_part)

    def send(
        self, index: int, region: Region, spec: TensorSpec, digest: bytes | None
    ) -> None:
        """Send one part; ``digest`` is its own, if that is known.

        :raises RemoteProtocolError: it is in memory of the host
        """
        place = region.place(spec)
        if not isinstance(place, DeviceMemory):
            raise RemoteProtocolError("a grant of a GPU's memory for what is on none")

        def sent(_: bytes, error: BaseException | None) -> None:
            if error is None:  # else the peer hears that the way is lost
                self._telling.tell(index, region, spec, digest)

        self._transport.send(self._transfer, index, place, sent)

    def stop(self) -> None:
        """Send no more."""
        self._transport.stop(self._transfer)
        self._telling.stop()
