"""Memory of a GPU, read and written by threads of the host through pinned slots.

A window is the host's sight of a GPU's bytes: a :class:`~asynckv.tensors.runs.Staged`
memory. While one slot of it is read or written, the next one is on its way.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Final, Literal

import torch

from asynckv.errors import AsyncKVError, GPUFailed
from asynckv.tensors.cuda import CudaApi, DeviceMemory, PinnedMemory
from asynckv.tensors.device_blocks import DeviceBlocks
from asynckv.tensors.device_moves import (
    DeviceMoves,
    Move,
    MoveOutcome,
    free_pinned,
    keep_for_ever,
)
from asynckv.tensors.device_tensors import DeviceTensors, TorchTensors
from asynckv.tensors.devices import cuda_of_this_process
from asynckv.tensors.on_gpu import KVOnGpu
from asynckv.tensors.runs import AnyMemory, Staged, copied, pieces_of
from asynckv.tensors.slots import Slot, SlotState, SlotTable

__all__ = (
    "CHUNK_NBYTES",
    "SLOTS",
    "ReadWindow",
    "Staging",
    "Stagings",
    "WriteWindow",
)


CHUNK_NBYTES: Final = 8 * 2**20
SLOTS: Final = 4

_LOOK_S: Final = 1.0
_STUCK: Final = "the GPU or its driver is stuck: nvidia-smi"

_AHEAD: Final = 1
"""So many slots of a window are on their way while another is read."""


class Staging:
    """Pinned slots for one GPU, and the thread that copies between both.

    Slots are allocated with the first window that is used, ``slots`` of
    ``chunk_nbytes``, and no more memory ever. :meth:`close` gives them back.
    """

    def __init__(
        self,
        open_cuda: Callable[[], CudaApi],
        device: int,
        *,
        chunk_nbytes: int = CHUNK_NBYTES,
        slots: int = SLOTS,
        limit_s: float = 30.0,
    ) -> None:
        self.chunk_nbytes = chunk_nbytes
        self.table = SlotTable(slots)
        self.changed = threading.Condition()
        self.moves = DeviceMoves(
            open_cuda,
            device,
            begin=self._allocate,
            end=self._free,
            failed=self.fail,
            limit_s=limit_s,
        )
        self.device = device
        self._memory: list[PinnedMemory] = []
        self._error: Exception | None = None

    def reader(self, memory: DeviceMemory) -> ReadWindow:
        """Return a window to read ``memory`` through, from its beginning, once."""
        return ReadWindow(self, memory)

    def writer(self, memory: DeviceMemory) -> WriteWindow:
        """Return a window to write ``memory`` through, from its beginning, once."""
        return WriteWindow(self, memory)

    def close(self) -> None:
        """Give the slots back when no copy is under way. Never waits."""
        self.moves.close()

    def memory_in(self, slot: Slot) -> PinnedMemory:
        """Return where a slot lies."""
        return self._memory[slot.number]

    def check(self) -> None:
        """Say why nothing more is copied.

        :raises GPUUnavailable: there is no GPU to be reached
        :raises GPUFailed: CUDA failed, or a copy was given up
        """
        if self._error is not None:
            error = self._error
            if isinstance(error, AsyncKVError):
                raise type(error)(error.message, hint=error.hint) from error
            raise GPUFailed(f"the staging of a GPU failed: {error!r}") from error

    def begin(self) -> None:
        """Have the slots, before the first one is asked for. Called under the lock."""
        while not self._memory:
            self.check()
            self.moves.start()
            self.wait()

    def wait(self) -> None:
        """Wait for a change. Called under the lock, which it lets go meanwhile.

        A thread that CUDA never lets go is given up, and with it what it copies.
        """
        if not self.changed.wait(_LOOK_S) and self.moves.is_stuck:
            for slot in self.table.slots:
                if slot.state is SlotState.MOVING:
                    slot.state = SlotState.LOST
                    keep_for_ever(slot.user)
            self.fail(GPUFailed("CUDA does not let its thread go", hint=_STUCK))

    def _allocate(self, cuda: CudaApi) -> None:
        count = len(self.table.slots)
        made = [cuda.host_alloc(self.chunk_nbytes) for _ in range(count)]
        with self.changed:
            self._memory = made
            self.changed.notify_all()

    def _free(self, cuda: CudaApi) -> None:
        with self.changed:
            memory, self._memory = self._memory, []
            lost = [slot.state is SlotState.LOST for slot in self.table.slots]
        for pinned, is_lost in zip(memory, lost, strict=False):
            if not is_lost:
                free_pinned(cuda, pinned)

    def fail(self, error: Exception) -> None:
        """Copy nothing more: all that wait learn why. In any thread."""
        with self.changed:
            self._error = self._error or error
            self.changed.notify_all()


class _Window(Staged):
    """What reading and writing have in common: slots, and copies that must end."""

    _way: Literal["in", "out"]

    def __init__(self, staging: Staging, memory: DeviceMemory) -> None:
        self.nbytes = memory.nbytes
        self._staging = staging
        self._memory: DeviceMemory | None = memory
        self._table = staging.table
        self._changed = staging.changed
        self._error: GPUFailed | None = None
        self._awaited: Slot | None = None
        """What a thread waits for: it is its own as soon as it is full."""
        self._is_left = False

    def reach(self, start: int) -> int:
        chunk_nbytes = self._staging.chunk_nbytes
        return min(self.nbytes, (start // chunk_nbytes + 1) * chunk_nbytes)

    def leave(self) -> None:
        with self._changed:
            self._is_left = True
            for slot in self._table.slots:
                if slot.user is self and slot.state in (SlotState.LENT, SlotState.FULL):
                    slot.free()
            if not self._table.moving(self):
                self._memory = None
            self._changed.notify_all()

    def wait_until_quiet(self) -> None:
        """Wait until no copy reads or writes the memory, or none ever ends."""
        self.leave()
        with self._changed:
            while self._table.moving(self):
                self._staging.wait()

    def _start(self, slot: Slot) -> None:
        """Queue the copy of a slot's bytes. Called under the lock."""
        memory = self._memory
        if memory is None:
            raise RuntimeError("this window of a GPU's memory was left")
        there = memory.address + slot.start
        here = self._staging.memory_in(slot).address
        is_in = self._way == "in"
        try:
            self._staging.moves.start(
                Move(
                    there if is_in else here,
                    here if is_in else there,
                    slot.stop - slot.start,
                    way=self._way,
                    ready=memory.ready,
                    owner=(memory, self._staging),
                    is_wanted=lambda: not self._is_left,
                    told=lambda outcome, error: self._ended(slot, outcome, error),
                )
            )
        except RuntimeError:
            slot.free()
            raise

    def _ended(self, slot: Slot, outcome: MoveOutcome, error: GPUFailed | None) -> None:
        with self._changed:
            if outcome == "done" and self._way == "out" and not self._is_left:
                is_awaited = slot is self._awaited
                slot.state = SlotState.LENT if is_awaited else SlotState.FULL
            elif outcome == "given up":
                slot.state = SlotState.LOST
                self._staging.fail(error or GPUFailed("a copy was given up"))
            else:
                slot.free()
            self._error = self._error or error
            if self._is_left and not self._table.moving(self):
                self._memory = None
            self._changed.notify_all()

    def _check(self) -> None:
        if self._is_left:
            raise RuntimeError("this window of a GPU's memory was left")
        if self._error is not None:
            error = self._error
            raise GPUFailed(error.message, code=error.code, hint=error.hint)
        self._staging.check()

    def _wait_for_slot(self, start: int) -> Slot:
        """Take a slot for the bytes from ``start`` on. Called under the lock."""
        self._staging.begin()
        self._table.waiting += 1
        try:
            self._check()
            while (found := self._table.take(self, start, self.reach(start))) is None:
                self._staging.wait()
                self._check()
        finally:
            self._table.waiting -= 1
        return found


class ReadWindow(_Window):
    """A GPU's bytes, read in order by one thread at a time."""

    _way = "out"

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        if start >= stop:
            return []
        with self._changed:
            self._check()
            if self._table.leave(self, start):
                self._changed.notify_all()
            slot = self._loaded(start)
            slot.state = SlotState.LENT
            self._read_ahead(slot.stop)
            view = self._staging.memory_in(slot).view
            return [view[start - slot.start : stop - slot.start]]

    def rest(self) -> None:
        with self._changed:
            slot = self._table.lent_to(self)
            if slot is not None:
                slot.state = SlotState.FULL
                self._changed.notify_all()

    def finish(self) -> None:
        self.wait_until_quiet()

    def _loaded(self, start: int) -> Slot:
        while True:
            slot = self._table.holding(self, start)
            if slot is None:
                slot = self._wait_for_slot(start)
                self._start(slot)
            if slot.state in (SlotState.FULL, SlotState.LENT):
                return slot
            self._awaited = slot
            try:
                self._staging.wait()
            finally:
                self._awaited = None
            self._check()

    def _read_ahead(self, start: int) -> None:
        for _ in range(_AHEAD):
            if start >= self.nbytes:
                return
            slot = self._table.holding(self, start)
            if slot is None:
                slot = self._table.take_ahead(self, start, self.reach(start))
                if slot is None:
                    return
                self._start(slot)
            start = slot.stop


class WriteWindow(_Window):
    """A GPU's bytes, written in order by one thread at a time."""

    _way = "in"

    def __init__(self, staging: Staging, memory: DeviceMemory) -> None:
        super().__init__(staging, memory)
        self._written = 0

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        if start >= stop:
            return []
        with self._changed:
            self._check()
            slot = self._table.lent_to(self)
            if slot is None or slot.stop <= start:
                self._flush()
                slot = self._wait_for_slot(start)
                slot.state = SlotState.LENT
            self._written = stop
            view = self._staging.memory_in(slot).view
            return [view[start - slot.start : stop - slot.start]]

    def rest(self) -> None:
        with self._changed:
            self._flush()

    def finish(self) -> None:
        with self._changed:
            self._check()
            self._flush()
            while self._table.moving(self):
                self._staging.wait()
            self._check()
        self.leave()

    def _flush(self) -> None:
        slot = self._table.lent_to(self)
        if slot is not None:
            slot.stop = min(slot.stop, self._written)
            slot.state = SlotState.MOVING
            self._start(slot)
            self._changed.notify_all()


logger = logging.getLogger(__name__)

_PIECE_NBYTES: Final = 2**20


class Stagings:
    """The staging of each GPU that somebody's tensors are on; opened when it is used.

    Without a tensor of a GPU it does nothing, and imports nothing.
    """

    def __init__(
        self,
        open_cuda: Callable[[], CudaApi] = cuda_of_this_process,
        tensors: DeviceTensors | None = None,
        *,
        chunk_nbytes: int = CHUNK_NBYTES,
        slots: int = SLOTS,
        limit_s: float = 30.0,
    ) -> None:
        self.tensors: DeviceTensors = tensors or TorchTensors()
        self._open_cuda = open_cuda
        self._chunk_nbytes, self._slots, self._limit_s = chunk_nbytes, slots, limit_s
        self._lock = threading.Lock()
        self._by_device: dict[int, Staging] = {}
        self._blocks: dict[int, DeviceBlocks] = {}
        self._is_closed = False

    def catch(self, tensor: torch.Tensor, *, is_written: bool = False) -> KVOnGpu:
        """Return what stands for a tensor of a GPU from now on.

        What is only read may have any strides: it is copied on its GPU first, in the
        caller's stream. Never waits; see :class:`~asynckv.tensors.on_gpu.KVOnGpu`.

        :raises ValueError: what is to be written is not contiguous
        """
        tensor = tensor.detach()
        if not is_written:
            tensor = tensor.resolve_conj().resolve_neg().contiguous()
        return KVOnGpu(tensor, self.tensors.memory_of(tensor))

    def reader(self, source: KVOnGpu) -> Staged:
        """Return memory to read a tensor of a GPU through."""
        return self._staging(source.memory.device).reader(source.memory)

    def writer(self, target: KVOnGpu) -> Staged:
        """Return memory to write a tensor of a GPU through."""
        return self._staging(target.memory.device).writer(target.memory)

    def blocks(self, device: int) -> DeviceBlocks:
        """Return what gathers and scatters blocks of a GPU."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the staging of GPUs is closed")
            if device not in self._blocks:
                self._blocks[device] = DeviceBlocks(
                    self._open_cuda,
                    device,
                    chunk_nbytes=self._chunk_nbytes,
                    limit_s=self._limit_s,
                )
            return self._blocks[device]

    def pieces(
        self, source: AnyMemory | KVOnGpu, target: AnyMemory | KVOnGpu | None
    ) -> Iterator[memoryview]:
        """Copy piece by piece, and yield each piece's bytes while they are hot.

        It waits, in a thread. Exhausted or closed: no GPU is at either end any more.

        :raises GPUUnavailable: CuPy, a driver or a GPU is missing
        :raises GPUFailed: CUDA failed; the target holds anything
        """
        with contextlib.ExitStack() as left:
            origin = self._opened(source, left, self.reader)
            if target is None:
                yield from _read(origin)
                return
            landing = self._opened(target, left, self.writer)
            yield from copied(origin, landing, _PIECE_NBYTES)
            if isinstance(landing, Staged):
                landing.finish()

    def close(self) -> None:
        """Give all pinned memory back, when no copy is under way. Never waits."""
        with self._lock:
            self._is_closed = True
            for staging in self._by_device.values():
                staging.close()
            blocks, self._blocks = list(self._blocks.values()), {}
        for one in blocks:  # CUDA may wait for the whole GPU
            name = f"asynckv-gpu-{one.device}-close"
            threading.Thread(
                target=_close, args=(one,), name=name, daemon=False
            ).start()

    def _opened(
        self,
        memory: AnyMemory | KVOnGpu,
        left: contextlib.ExitStack,
        window: Callable[[KVOnGpu], Staged],
    ) -> AnyMemory:
        if not isinstance(memory, KVOnGpu):
            return memory
        opened = window(memory)
        left.callback(opened.wait_until_quiet)
        return opened

    def _staging(self, device: int) -> Staging:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the staging of GPUs is closed")
            found = self._by_device.get(device)
            if found is None:
                found = self._by_device[device] = Staging(
                    self._open_cuda,
                    device,
                    chunk_nbytes=self._chunk_nbytes,
                    slots=self._slots,
                    limit_s=self._limit_s,
                )
            return found


def _close(blocks: DeviceBlocks) -> None:
    try:
        blocks.close()
    except GPUFailed as exc:  # its context is gone, and all memory with that
        logger.warning("GPU %d took its memory back badly: %s", blocks.device, exc)


def _read(origin: AnyMemory) -> Iterator[memoryview]:
    start = 0
    while start < origin.nbytes:
        stop = min(start + _PIECE_NBYTES, origin.nbytes)
        if isinstance(origin, Staged):
            stop = min(stop, origin.reach(start))
        yield from pieces_of(origin, start, stop)
        start = stop
