"""Copies in host memory of what peers get of a GPU by sockets, and their bound.

What is longer than a piece leaves while the rest of it is on its way to the host. What
is copied stays until a lane has sent it, which a slow peer delays for as long as it
likes. So the bytes are counted from the copy's turn until its memory is gone, wherever
that is: a lane may be at it when nobody wants it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy
import numpy.typing

from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.tensors import KVOnGpu
from asynckv.tensors.feeds import Feed
from asynckv.tensors.views import tensor_over
from asynckv.transfers.source import Source
from asynckv.types import TensorSpec
from asynckv.waits.waiting import ByteRoom

__all__ = (
    "HOST_COPIES_NBYTES",
    "PIECE_NBYTES",
    "D2HCopier",
    "HostCopies",
    "HostCopy",
)


HOST_COPIES_NBYTES: Final = 64 * 2**20
"""Of one link; a longer tensor is alone."""

_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]


class HostCopies(ByteRoom):
    """Memory of the host for one link's copies, first come, first served.

    There is more than the bound only if it is one tensor's.
    """

    def __init__(self, max_bytes: int = HOST_COPIES_NBYTES) -> None:
        super().__init__(
            max_bytes,
            who="a copy from a GPU",
            what=f"room in the host for copies of {max_bytes} bytes",
            ends_with="the sending of another copy",
        )
        self._loop = asyncio.get_running_loop()

    async def empty(self, nbytes: int) -> memoryview:
        """Return new memory, which counts as long as anything refers to it.

        Waits behind those who asked before, until others' is gone. A cancelled call
        leaves no trace.
        """
        await self.take(nbytes)
        try:
            memory = numpy.empty(nbytes, numpy.uint8)
        except BaseException:
            self.release(nbytes)
            raise
        return numpy.asarray(_Counted(self, memory)).data

    def gone_soon(self, nbytes: int) -> None:
        """Some memory is gone. Called by finalizers: in any thread, at any moment."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.release, nbytes)


class _Counted:
    """What all views of one copy are based on: its life is what counts."""

    __slots__ = ("__array_interface__", "_copies", "_memory")

    def __init__(self, copies: HostCopies, memory: _Bytes) -> None:
        self._copies = copies
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._copies.gone_soon(self._memory.nbytes)


PIECE_NBYTES: Final = 8 * 2**20

HostCopy: TypeAlias = memoryview | Feed
"""A copy that is whole, or one that has begun and is fed."""


class D2HCopier:
    """Reads a GPU for one peer, by ``pool``, one at a time, to memory of ``copies``.

    ``feeds`` copies may be fed at a time, as the link's payload says, and their pieces
    take turns; with none each is copied whole.
    """

    def __init__(self, pool: CopyPool, copies: HostCopies, feeds: int = 0) -> None:
        self._piece_nbytes = PIECE_NBYTES
        self._pool = pool
        self._copies = copies
        self._may_feed = bool(feeds)
        self._feeding = asyncio.Semaphore(max(feeds, 1))
        self._turn = asyncio.Lock()

    async def digest(self, source: Source) -> bytes:
        """Return the digest of all its bytes. Waits for no copy to be sent.

        :raises GPUFailed: the GPU failed
        """
        async with self._turn:
            (digest,) = await self._pool.digest([source.place()])
            return digest

    async def copy(self, source: Source, copied: Callable[[HostCopy], None]) -> None:
        """Copy it as there is room for it; call ``copied`` once, with all of it, or, if
        it is fed, when its first piece is there.

        The room is others' when nothing refers to the copy any more. When this ends, be
        it cancelled or by an error, no GPU reads the source; a feed that has begun
        waits then for bytes that never come: whoever was given it is to stop it.

        :raises GPUFailed: the GPU failed
        """
        if self._may_feed and source.nbytes > self._piece_nbytes:
            async with self._feeding:
                await self._feed(source, copied)
            return
        memory = None
        try:
            memory = await self._piece(source, 0, source.nbytes)
            copied(memory)
        finally:
            memory = None  # whoever keeps the task keeps this frame

    async def _feed(self, source: Source, copied: Callable[[HostCopy], None]) -> None:
        feed, nbytes = Feed(source.nbytes), self._piece_nbytes
        try:
            for start in range(0, source.nbytes, nbytes):
                stop = min(start + nbytes, source.nbytes)
                feed.put(await self._piece(source, start, stop))
                if not start:
                    copied(feed)
        finally:
            del feed  # as there

    async def _piece(self, source: Source, start: int, stop: int) -> memoryview:
        """Wait for room, and for the turn, to copy those bytes; return the copy."""
        memory = await self._copies.empty(stop - start)
        try:
            async with self._turn:
                place = source.place()
                if not isinstance(place, DeviceMemory | KVOnGpu):
                    raise TypeError("what is copied so lies on a GPU")
                target = tensor_over(memory, TensorSpec((stop - start,), "uint8"))
                part = place.part(start, stop)
                copying = self._pool.copy([part], [target], digest=False)
                del target, place, part  # as there
                await copying
            return memory
        finally:
            del memory  # as there
