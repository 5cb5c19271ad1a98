"""The parts of one transfer that leave for a peer's buffer, once it grants them.

As the peer's memory is: by the link's payload, or from GPU to GPU, be they in host
memory or on this side's GPU; what is small rides. Plain functions; tasks read back
what a GPU has. What left from GPU to GPU may be asked for once more by the link's
payload, until the peer says that it has verified it: the sources are kept until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

from asynckv.buffers.gpu_staging import Source, StagedTensor, places_of
from asynckv.errors import RemoteProtocolError
from asynckv.links.gpu_link import GpuLink
from asynckv.links.link import Link
from asynckv.links.requests import LinkStream
from asynckv.links.riding import RidingParts, rides
from asynckv.protocol.device_frames import GrantDevices, SentDevices
from asynckv.protocol.handshake import DigestMode, strictest
from asynckv.shielding import wait_shielded
from asynckv.tensors.blocks import memory_of
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.runs import Memory, joined
from asynckv.tensors.views import bytes_of

__all__ = ("LeavingParts", "OutwardWays")


class OutwardWays(Protocol):
    """Whoever knows what leads from its GPU to those of its peers."""

    pool: CopyPool

    def way(self, link: Link) -> GpuLink | None:
        """Return what does, while it does."""


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
        self._failed = failed
        self._riding: RidingParts | None = None
        self._is_by_gpu = False
        self._way: GpuLink | None = None
        self._lent_to: GpuLink | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    @property
    def is_busy(self) -> bool:
        """Whether a task, or a worker of NCCL, may still read the sources."""
        return bool(self._tasks) or self._lent_to is not None

    def on_grant(self) -> None:
        """Send all by the link's payload: once more what left before.

        So it is granted again what was given back on its way past the buffer.
        """
        if self._is_stopped:
            return
        if not self._is_by_gpu:
            self._ride()
        self._leave_way()
        staged = dict[int, StagedTensor]()
        for index, source in self._large():
            if isinstance(source, StagedTensor):
                staged[index] = source
            else:
                self._send_by_link(index, memory_of(source))
        if staged and self._ways is not None:
            self._start(partial(self._hoist, staged, self._ways.pool))

    def on_grant_devices(self, frame: GrantDevices) -> None:
        """Send all from GPU to GPU.

        If this side's way is over, the peer will hear of that, and grant it again.

        :raises RemoteProtocolError: nothing ever led there, or it was granted before
        """
        if self._ways is None or self._is_by_gpu:
            raise RemoteProtocolError("a grant of memory that nothing leads to")
        if self._is_stopped:
            return
        self._ride()
        self._is_by_gpu = True
        self._way = way = self._ways.way(self._link)
        if way is None:
            return
        is_off = strictest(way.digest, frame.kind) == "off"
        kind: DigestMode = "off" if is_off else "full"
        for index, source in self._large():
            self._send_by_gpu(way, kind, index, source)

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

        At most 1 s; but what is in host memory and was sent from GPU to GPU is read
        until NCCL's worker lets go, or is given up. A GPU may still read what is
        staged: that is kept for it.
        """
        self.stop()
        try:  # each waits, however often the one before it was cancelled
            await wait_shielded(asyncio.gather(*self._tasks, return_exceptions=True))
        finally:
            try:
                await self._link.payload.quiesce(self._transfer)
            finally:
                if self._lent_to is not None:
                    await self._lent_to.transport.quiesce(self._transfer)

    def _large(self) -> list[tuple[int, Source]]:
        every = enumerate(self._sources)
        return [(index, source) for index, source in every if not rides(source.nbytes)]

    def _ride(self) -> None:
        """Let small parts leave: once each time that all are asked for."""
        riding = RidingParts(self._link, self._stream, self._transfer)
        for index, source in enumerate(self._sources):
            if rides(source.nbytes) and not isinstance(source, StagedTensor):
                read = partial(joined, memory_of(source))
                riding.add(index, source.nbytes, read, self._known(index))
        self._riding = riding

    def _leave_way(self) -> None:
        way, self._way, self._is_by_gpu = self._way, None, False
        if way is not None:
            way.transport.stop(self._transfer)
        for task in self._tasks:
            task.cancel()

    def _known(self, index: int) -> bytes | None:
        return None if self._digests is None else self._digests[index]

    def _send_by_link(self, index: int, memory: Memory) -> None:
        sent, digest = partial(self._sent, index), self._known(index)
        payload = self._link.payload
        payload.send(self._transfer, index, memory, sent, digest=digest)

    def _sent(self, index: int, digest: bytes, error: BaseException | None) -> None:
        if not self._is_stopped:
            self._left(index, digest, error)

    def _send_by_gpu(
        self, way: GpuLink, kind: DigestMode, index: int, source: Source
    ) -> None:
        telling = partial(self._tell_sent, kind, index, source)

        def sent(_: bytes, error: BaseException | None) -> None:
            if error is None and self._way is way:  # else it is asked for again
                self._start(telling)

        if isinstance(source, StagedTensor):
            way.transport.send(self._transfer, index, source.place(), sent)
        else:
            self._lent_to = way
            way.transport.send(self._transfer, index, memory_of(source), sent)

    async def _tell_sent(self, kind: DigestMode, index: int, source: Source) -> None:
        digest = b""
        if kind == "full" and self._ways is not None:
            digest = self._known(index) or b""
            if not digest:
                (digest,) = await self._ways.pool.digest(places_of([source]))
        self._stream.send(SentDevices(self._transfer, index, kind, digest))

    async def _hoist(self, staged: dict[int, StagedTensor], pool: CopyPool) -> None:
        """Bring what is on the GPU to the host, and send it from there."""
        for index, source in staged.items():
            copy = pool.host_empty(source.spec)
            await pool.copy([source.place()], [copy], digest=False)
            self._send_by_link(index, bytes_of(copy))

    def _start(self, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.get_running_loop().create_task(
            self._try(work), name=f"asynckv: transfer {self._transfer} to a buffer"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _try(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as exc:  # noqa: BLE001 - whoever waits for it is told
            self._failed(exc)
