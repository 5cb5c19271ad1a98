"""The GPUs themselves, and who shares them."""

from __future__ import annotations

import os
import random
import struct
import threading
from collections.abc import Callable
from typing import Final

from asynckv.devices.cuda import IPC_HANDLE_NBYTES
from asynckv.errors import GPUFailed
from harness.fake_gpus.communicators import NcclWork
from harness.fake_gpus.cuda import FakeCuda
from harness.fake_gpus.memory import AddressSpace, Allocation, shared_bytes
from harness.fake_gpus.nccl import FakeNccl
from harness.fake_gpus.streams import FakeStream
from harness.fake_gpus.wires import Meetings

__all__ = ("FakeGpus", "FakeProcess")

_HANDLE: Final = struct.Struct("<QQQQQ")
_LOOK_AGAIN_S: Final = 0.002
"""Nobody says when bytes come over a socket."""


class FakeGpus:
    """Some GPUs. ``max_delay``: work takes up to as many looks, chosen by ``seed``.

    ``uuids`` name them; in another real process the same names are the same GPUs.
    ``sockets``: communicators meet by sockets, as those of other real processes do.
    """

    def __init__(
        self,
        count: int = 1,
        *,
        seed: int = 0,
        max_delay: int = 0,
        sockets: bool = False,
    ) -> None:
        # Alike up to a zero byte: as C strings all of them would be the same.
        self.uuids = [f"ab00{number:028x}" for number in range(1, count + 1)]
        self.faults: list[str] = []
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.meetings = Meetings(by_sockets=sockets)
        self.has_peer_access = False
        """Can each GPU reach the memory of the others?"""
        self._random = random.Random(seed)
        self._max_delay = max_delay
        self._processes: list[FakeProcess] = []
        self._shared: dict[int, Allocation] = {}
        self._is_closed = False
        self._kept: list[str] = []
        self._keeps_nobody = False

    @property
    def kept(self) -> list[str]:
        """For what threads are kept in a call now."""
        with self.lock:
            return list(self._kept)

    @property
    def is_closed(self) -> bool:
        """Whether nobody waits any more."""
        return self._is_closed

    def process(self) -> FakeProcess:
        """Start a process that sees all these GPUs."""
        with self.lock:
            process = FakeProcess(self, len(self._processes))
            self._processes.append(process)
            return process

    def note(self, fault: str) -> None:
        """Somebody has done what real hardware punishes."""
        self.faults.append(fault)

    def delay(self) -> int:
        """How many looks the next piece of work takes."""
        return self._random.randint(0, self._max_delay) if self._max_delay else 0

    def progress(self) -> None:
        """Let all work get on that can."""
        with self.lock:
            for process in self._processes:
                for stream in list(process.streams.values()):
                    stream.get_on()
            self.changed.notify_all()

    def block(self, is_over: Callable[[], bool], what: str) -> None:
        """Keep this thread until ``is_over()``, for ever if need be.

        :raises GPUFailed: it was let go, or the test is over
        """
        with self.changed:
            self._kept.append(what)
            try:
                while not is_over():
                    if self._keeps_nobody:
                        raise GPUFailed(f"nobody waits any more for {what}")
                    self.progress()
                    if not is_over():
                        self.changed.wait(_LOOK_AGAIN_S)
            finally:
                self._kept.remove(what)

    def release(self) -> None:
        """Keep no thread in a call from here on: one that would wait fails instead.

        A real one would be kept for ever. Nothing else of the GPUs ends.
        """
        with self.changed:
            self._keeps_nobody = True
            self.changed.notify_all()

    def close(self) -> None:
        """Let every thread go that is kept in a call. To be called last."""
        with self.changed:
            self._is_closed = True
            self.release()
            for process in self._processes:
                process.end()
            for allocation in self._shared.values():
                allocation.drop()
            self.meetings.close()

    def handle_of(self, allocation: Allocation, key: int) -> bytes:
        """Name what another process may map."""
        file = allocation.share()
        self._shared[file] = allocation
        packed = _HANDLE.pack(
            os.getpid(), key, file, allocation.array.nbytes, allocation.device
        )
        return packed.ljust(IPC_HANDLE_NBYTES, b"\0")

    def open_handle(
        self, handle: bytes, nbytes: int, process: FakeProcess
    ) -> Allocation:
        """Return what another process has named.

        :raises GPUFailed: it was this one, or it is gone, or is out of reach
        """
        pid, key, file, shared_nbytes, device = _HANDLE.unpack_from(handle)
        if (pid, key) == (os.getpid(), process.key):
            raise GPUFailed("a process cannot open what it has exported", code=201)
        if device != process.cuda.device and not self.has_peer_access:
            raise GPUFailed("one GPU cannot reach the other", code=217)
        if nbytes != shared_nbytes:
            raise GPUFailed(f"{nbytes} bytes of {shared_nbytes}", code=1)
        if pid == os.getpid():
            allocation = self._shared.get(file)
            if allocation is None or allocation.is_gone:
                raise GPUFailed("what was exported is gone", code=1)
            return allocation
        try:
            opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
        except OSError as exc:
            raise GPUFailed(f"what was exported is gone: {exc}", code=1) from exc
        try:
            return Allocation(shared_bytes(opened, nbytes), process.cuda.device)
        finally:
            os.close(opened)


class FakeProcess:
    """A process: its own addresses, its own threads in NCCL, one life."""

    def __init__(self, gpus: FakeGpus, number: int) -> None:
        self.gpus = gpus
        self.key = number + 1
        self.space = AddressSpace(number)
        self.owned: list[Allocation] = []
        self.streams: dict[int, FakeStream] = {}
        self.cuda = FakeCuda(self)
        self.nccl = FakeNccl(self)

    def waits_for_peers(self, device: int) -> bool:
        """Whether an operation of this process waits for its peer on that GPU."""
        return any(
            stream.device == device and isinstance(stream.work[0], NcclWork)
            for stream in self.streams.values()
            if stream.work
        )

    def end(self) -> None:
        """It has died: its memory is gone, and it answers nobody any more."""
        with self.gpus.lock:
            self.streams.clear()
            for allocation in self.owned:
                allocation.drop()
            self.owned.clear()
            self.nccl.die()
