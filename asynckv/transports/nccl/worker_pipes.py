"""One pipe, as its GPU's worker has it: communicator and stream."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from asynckv.devices.cuda import CudaApi, DeviceMemory, Event, Stream
from asynckv.errors import GPUFailed
from asynckv.transports.nccl.api import Comm, NcclApi

__all__ = ("PipeEnd", "WorkerPipe")

logger = logging.getLogger(__name__)

PipeEnd: TypeAlias = Literal["send", "receive"]

_SENDER: Final = 0
_RECEIVER: Final = 1


class WorkerPipe:
    """One direction to one peer. Used on the worker's thread, but for its making.

    ``opened()`` is called when the first byte has moved, within ``open_s``, and
    ``lost(error)`` once after any end: when nothing of it moves any more, or when the
    worker was given up.
    """

    def __init__(
        self,
        cuda: CudaApi,
        nccl: NcclApi,
        end: PipeEnd,
        *,
        opened: Callable[[], None],
        lost: Callable[[Exception], None],
    ) -> None:
        self.end: PipeEnd = end
        self.error: Exception | None = None
        self.quiet_by: float | None = None
        self.opened = opened
        self.open_s = 10.0
        self._cuda = cuda
        self._nccl = nccl
        self._lost: Callable[[Exception], None] | None = lost
        self._comm: Comm | None = None
        self._stream: Stream | None = None
        self._own = _SENDER if end == "send" else _RECEIVER

    def __repr__(self) -> str:
        return f"<{self.end} pipe>"

    @property
    def stream(self) -> Stream:
        """That of all its operations."""
        if self._stream is None:
            raise GPUFailed("the pipe is not open")
        return self._stream

    def lost(self, error: Exception) -> None:
        """Tell of the end, once."""
        callback, self._lost = self._lost, None
        if callback is not None:
            callback(error)

    def open(self, unique_id: bytes, scratch: DeviceMemory) -> None:
        """Wait for the peer, and post one byte: the first operation connects.

        :raises GPUFailed: it cannot be opened
        """
        self._stream = self._cuda.stream()
        self._comm = self._nccl.open_comm(2, unique_id, self._own)
        self.post(scratch.address, 1)

    def post(self, address: int, nbytes: int) -> None:
        """Queue the next operation, in the pipe's own direction."""
        if self._comm is None:
            raise GPUFailed("the pipe is not open")
        self._nccl.group_start()
        try:
            if self.end == "send":
                self._comm.send(address, nbytes, 1 - self._own, self.stream)
            else:
                self._comm.receive(address, nbytes, 1 - self._own, self.stream)
        finally:
            self._nccl.group_end()

    def mark(self) -> Event:
        """Return an event behind all that is queued.

        :raises GPUFailed: the stream has failed: nothing is queued any more
        """
        stream = self.stream
        event = self._cuda.event()
        event.record(stream)
        return event

    def mark_if_possible(self) -> Event | None:
        """Return an event behind all that is queued; None: there is nothing."""
        try:
            return self.mark()
        except GPUFailed:
            return None

    def async_error(self) -> Exception | None:
        """What has gone wrong since, if anything: CuPy may raise a KeyError too."""
        if self._comm is not None:
            try:
                self._comm.check_async_error()
            except Exception as exc:  # noqa: BLE001 - it is returned
                return exc
        return None

    def end_comm(self, *, is_aborted: bool) -> Comm | None:
        """Abort the communicator: what is queued ends, its bytes undefined.

        Or destroy it, when nothing is queued. Return one that did not end: where it is
        collected, it would be destroyed.
        """
        comm, self._comm = self._comm, None
        if comm is None:
            return None
        try:
            comm.abort() if is_aborted else comm.destroy()
        except Exception as exc:  # noqa: BLE001 - nothing is left to be tried
            how = "aborted" if is_aborted else "destroyed"
            logger.warning("%s could not be %s: %s", self, how, exc)
            return comm
        return None

    def release(self) -> None:
        """Give the stream back: nothing is queued on it."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
