"""One pipe, as its GPU's worker has it: communicator and stream."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from asynckv.errors import GPUFailed
from asynckv.tensors.cuda import CudaApi, DeviceMemory, Event, Stream
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
        end: PipeEnd,
        *,
        opened: Callable[[], None],
        lost: Callable[[Exception], None],
        open_s: float = 10.0,
    ) -> None:
        self.end: PipeEnd = end
        self.error: Exception | None = None
        self.quiet_by: float | None = None
        self.opened = opened
        self.failed_comm: Comm | None = None
        """One that did not end: where it is collected, it would be destroyed."""
        self._lost: Callable[[Exception], None] | None = lost
        self.open_s = open_s
        self._comm: Comm | None = None
        self._stream: Stream | None = None
        self._cuda: CudaApi | None = None
        self._nccl: NcclApi | None = None
        self._own = _SENDER if end == "send" else _RECEIVER

    def __repr__(self) -> str:
        return f"<{self.end} pipe>"

    @property
    def stream(self) -> Stream:
        """That of all its operations."""
        if self._stream is None:
            raise GPUFailed("the pipe is not open")
        return self._stream

    @property
    def cuda(self) -> CudaApi:
        """The worker's."""
        if self._cuda is None:
            raise GPUFailed("the pipe is not open")
        return self._cuda

    def lost(self, error: Exception) -> None:
        """Tell of the end, once."""
        tell, self._lost = self._lost, None
        if tell is not None:
            tell(error)

    def open(
        self, cuda: CudaApi, nccl: NcclApi, unique_id: bytes, scratch: DeviceMemory
    ) -> None:
        """Wait for the peer, and post one byte: the first operation connects.

        :raises GPUFailed: it cannot be opened
        """
        self._cuda, self._nccl = cuda, nccl
        self._stream = cuda.stream()
        self._comm = nccl.open_comm(2, unique_id, self._own)
        self.post(scratch.address, 1)

    def post(self, address: int, nbytes: int) -> None:
        """Queue the next operation, in the pipe's own direction."""
        if self._comm is None or self._nccl is None:
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
        event = self.cuda.event()
        event.record(self.stream)
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

    def abort(self) -> None:
        """Abort the communicator. What is queued ends, its bytes undefined."""
        self._end(aborted=True)

    def destroy(self) -> None:
        """Destroy the communicator; nothing is queued on it."""
        self._end(aborted=False)

    def _end(self, *, aborted: bool) -> None:
        comm, self._comm = self._comm, None
        if comm is None:
            return
        try:
            comm.abort() if aborted else comm.destroy()
        except Exception as exc:  # noqa: BLE001 - nothing is left to be tried
            how = "aborted" if aborted else "destroyed"
            logger.warning("%s could not be %s: %s", self, how, exc)
            self.failed_comm = comm

    def release(self) -> None:
        """Give the stream back: nothing is queued on it."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
