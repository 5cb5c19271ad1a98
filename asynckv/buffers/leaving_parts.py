"""The parts of one transfer that leave for a peer's buffer, once it grants them.

As the peer's memory is: by the link's payload, or from GPU to GPU, be they in host
memory or on this side's GPU; what is small rides. Plain functions; tasks read back
what a GPU has, piece by piece while the last one is on the wire. What left from GPU to
GPU may be asked for once more by the link's payload, until the peer says that it has
verified it: the sources are kept until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from asynckv.buffers.gpu_sources import SourceOnGpu
from asynckv.buffers.gpu_staging import Source, StagedTensor, are_staged, places_of
from asynckv.buffers.hoisting import Hoisting, HostCopy
from asynckv.buffers.host_copies import HostCopies
from asynckv.buffers.shown_parts import ShownParts, ShownTo
from asynckv.errors import RemoteProtocolError
from asynckv.links.gpu_link import GpuLink
from asynckv.links.link import Link
from asynckv.links.own_tasks import OwnTasks
from asynckv.links.requests import LinkStream
from asynckv.links.riding import RidingParts, rides
from asynckv.protocol.device_frames import GrantDevices, SentDevices
from asynckv.protocol.handshake import DigestMode, strictest
from asynckv.protocol.ipc_frames import GrantShared
from asynckv.tensors.blocks import memory_of
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.feeds import Feed
from asynckv.tensors.on_gpu import KVOnGpu
from asynckv.tensors.runs import Memory, joined

__all__ = ("LeavingParts", "OutwardWays")


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
