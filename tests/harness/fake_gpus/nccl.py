"""NCCL as one process has it: what blocks there blocks here, for as long.

What real NCCL leaves undefined is refused here, and written down as a fault: two
threads in it at once, a communicator used by a thread that did not make it, or left to
the garbage collector.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from asynckv.errors import GPUFailed
from harness.fake_gpus.communicators import FakeComm, NcclWork, Operation

if TYPE_CHECKING:
    from harness.fake_gpus.fabric import FakeProcess

__all__ = ("FakeNccl",)

_INVALID_USAGE: Final = 5


class FakeNccl:
    """Fits :class:`~asynckv.transports.nccl.api.NcclApi`, and does harm on request."""

    def __init__(self, process: FakeProcess) -> None:
        self.process = process
        self.number = 22809
        """The version that it says it has."""
        self.async_error: BaseException | None = None
        """What every communicator finds has gone wrong; nothing moves meanwhile."""
        self.call_error: BaseException | None = None
        """What the next group raises."""
        self.is_silent = False
        """What this process posts never reaches its peers."""
        self.destroy_blocks = False
        self.abort_ticks: int | None = 0
        """Looks until work ends that was aborted; None: it never does."""
        self.unique_ids = 0
        """How many were made: each costs a thread and a socket."""
        self._inside: dict[int, int] = {}
        self._group = threading.local()
        self._is_dead = False

    def version(self) -> int:
        return self.number

    def unique_id(self) -> bytes:
        with self.process.gpus.lock:
            self.unique_ids += 1
            return self.process.gpus.meetings.unique_id()

    def open_comm(self, ranks: int, unique_id: bytes, rank: int) -> FakeComm:
        if ranks != 2:
            raise GPUFailed("these have two ranks", code=_INVALID_USAGE)
        gpus, device = self.process.gpus, self.process.cuda.device
        with self.inside(device, "opened a communicator"):
            with gpus.lock:
                wire = gpus.meetings.join(unique_id, rank)
            comm = FakeComm(self, wire, device)
            comm.greet(gpus.uuids[device], self.number)
            try:
                gpus.block(comm.look_for_peer, "the other rank")
            except BaseException:
                comm.abort()
                raise
        return comm

    def group_start(self) -> None:
        self._group.operations = []

    def group_end(self) -> None:
        operations: list[Operation] = getattr(self._group, "operations", [])
        self._group.operations = None
        if self.call_error is not None:
            error, self.call_error = self.call_error, None
            raise error
        if operations:
            self._post(operations)

    def queue(self, operation: Operation) -> None:
        """Take an operation for the group, or as a group of its own."""
        operations = getattr(self._group, "operations", None)
        if operations is None:
            self.group_start()
            self._group.operations.append(operation)
            self.group_end()
        else:
            operations.append(operation)

    @contextlib.contextmanager
    def inside(self, device: int, what: str) -> Iterator[None]:
        """Be the one thread that is in NCCL for ``device``.

        :raises GPUFailed: another one is, or the process has died
        """
        gpus, thread = self.process.gpus, threading.get_ident()
        self.process.cuda.check_capture(f"NCCL was called: it {what},")
        with gpus.lock:
            if self._is_dead:
                raise GPUFailed("this process has died", code=2)
            before = self._inside.get(device)
            if before not in (None, thread):
                gpus.note(f"a thread {what} while another was inside")
                raise GPUFailed(f"another thread is inside: {what}", code=3)
            self._inside[device] = thread
        try:
            yield
        finally:
            if before is None:
                with gpus.lock:
                    del self._inside[device]

    def die(self) -> None:
        """The process has: it says nothing more."""
        self._is_dead = True

    @property
    def says_nothing(self) -> bool:
        """Whether peers hear of it any more."""
        return self._is_dead or self.is_silent

    def _post(self, operations: list[Operation]) -> None:
        comm, stream = operations[0].comm, operations[0].stream
        if any(one.comm is not comm or one.stream is not stream for one in operations):
            raise GPUFailed("these groups are of one pair", code=_INVALID_USAGE)
        with self.inside(comm.device, "posted"):
            with self.process.gpus.lock:
                work = NcclWork(comm, operations)
                comm.line.append(work)
                stream.add(work)
            comm.connect(operations)
