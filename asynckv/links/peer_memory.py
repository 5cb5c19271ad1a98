"""The peer's memory of a GPU that is open here, and what is being read of it.

It is closed when nothing reads it any more: the peer frees it then, or uses it again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from asynckv.errors import ChecksumError, PeerLost, RemoteProtocolError
from asynckv.links.exports import Export
from asynckv.shielding import clear_all_frames
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.imports import in_thread
from asynckv.tensors.packing import ALIGNMENT_NBYTES

__all__ = ("PeerMemory", "Read")

_CLOSE_S: Final = 2.0

Read: TypeAlias = Callable[[DeviceMemory, DeviceMemory], Awaitable[None]]
"""Copies from the first place to the second, and compares what has landed.

It raises ``ChecksumError`` if those are other bytes, and anything else if they cannot
be read.
"""


class PeerMemory:
    """What one link has open of its peer's, from :meth:`put` on.

    ``failed`` is told why something cannot be read.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._export: Export | None = None
        self._reads: set[asyncio.Task[None]] = set()
        self._is_over = False
        self._closed: asyncio.Future[None] | None = None

    def put(self, export: Export) -> None:
        """Use that from here on; it is closed at once if nobody wants it any more."""
        self._export = export
        self._close_if_over()

    def check(self, offset: int, nbytes: int) -> None:
        """Check that a tensor lies in what the peer has shown.

        :raises RemoteProtocolError: it lies beyond, or where no tensor begins
        """
        end = offset + nbytes
        if self._export is not None and end > self._export.allocation.nbytes:
            raise RemoteProtocolError("a tensor beyond the memory that was exported")
        if offset % ALIGNMENT_NBYTES:
            raise RemoteProtocolError(f"a tensor at {offset} bytes: not aligned")

    def read(
        self,
        offset: int,
        target: DeviceMemory,
        copy: Read,
        done: Callable[[Exception | None], None],
    ) -> asyncio.Task[None]:
        """Copy what lies there to ``target``; ``done`` is told why it is not there.

        If the task is cancelled it is told nothing; it ends when the GPU is done with
        both places. Never waits.
        """
        task = asyncio.get_running_loop().create_task(
            self._read(offset, target, copy, done), name="asynckv: read a peer's GPU"
        )
        self._reads.add(task)
        task.add_done_callback(self._on_read)
        return task

    def close(self) -> None:
        """Close it when nothing reads it. Never waits."""
        self._is_over = True
        self._close_if_over()

    async def aclose(self) -> None:
        """Read nothing more, and wait until it is closed, 2 s at most."""
        for task in self._reads:
            task.cancel()
        self.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                if self._reads:
                    await asyncio.wait(set(self._reads))
                if self._closed is not None:
                    await asyncio.wait({self._closed})

    async def _read(
        self,
        offset: int,
        target: DeviceMemory,
        copy: Read,
        done: Callable[[Exception | None], None],
    ) -> None:
        try:
            if self._export is None:
                raise PeerLost("the peer's memory is closed")
            memory = self._export.allocation.memory
            source = memory.part(offset, offset + target.nbytes)
            await copy(source, target)
        except Exception as exc:  # noqa: BLE001 - whoever waits for it is told
            clear_all_frames(exc)  # they keep both places
            memory = source = target = copy = None  # type: ignore[assignment]
            if not isinstance(exc, ChecksumError):
                self._failed(exc)
            done(exc)
        else:
            done(None)

    def _on_read(self, task: asyncio.Task[None]) -> None:
        self._reads.discard(task)
        self._close_if_over()

    def _close_if_over(self) -> None:
        export = self._export
        if export is None or self._reads or not self._is_over:
            return
        self._export = None
        loop = asyncio.get_running_loop()
        closed = self._closed = loop.create_future()

        def close() -> None:
            export.close()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(closed.set_result, None)

        in_thread(close)
