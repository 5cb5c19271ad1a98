"""The memory of one GPU that a buffer has: one allocation, and who has its pages.

As :class:`~asynckv.tensors.slab_pages.SlabPages`, but all there is comes at once, by
plain ``cudaMalloc``, and nothing lies in two places: a tensor of a GPU cannot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Sequence
from typing import Final

from asynckv.errors import GPUFailed, GPUUnavailable
from asynckv.tensors.allocator import PageAllocator
from asynckv.tensors.arena import Pages, pack, pages_of
from asynckv.tensors.cuda import CudaApi, DeviceMemory, Event, Stream
from asynckv.tensors.device_tensors import Gpus
from asynckv.tensors.devices import Device
from asynckv.tensors.quiet_gpus import QuietGpu, quiet_gpu
from asynckv.tensors.slab_pages import Place
from asynckv.tensors.slabs import PAGE_NBYTES

__all__ = (
    "MARK_NBYTES",
    "NONCE_NBYTES",
    "DeviceAllocation",
    "DevicePages",
    "IdleDevice",
)

_LEAST_NBYTES: Final = 2**20
"""Where the whole cannot be had, halves of it are tried down to this."""

MARK_NBYTES: Final = 512
"""At the end of it: what is no buffer's, a nonce among it."""

NONCE_NBYTES: Final = 16


class DeviceAllocation:
    """Memory of a GPU that is freed with the last reference to it.

    The arena, every view and every importer have one. Whoever knows that it may be the
    last drops it off the event loop: freeing waits for the GPU.
    """

    def __init__(self, gpus: Gpus, memory: DeviceMemory) -> None:
        self.gpus = gpus
        self.memory = memory
        self.uuid = gpus.cuda.uuid(memory.device)
        self.nonce = secrets.token_bytes(NONCE_NBYTES)
        self.nbytes = memory.nbytes - MARK_NBYTES
        self.mark = memory.part(self.nbytes, memory.nbytes)
        try:
            # Once and first: slow, and a fake moves the bytes to share them.
            self.handle = gpus.cuda.export(memory)
        except GPUFailed:  # no system where memory of a GPU can be shared
            self.handle = b""
        _write(gpus.cuda, self.mark, self.nonce)

    def __del__(self) -> None:
        with contextlib.suppress(GPUFailed):  # its context is gone, and this with it
            self.gpus.cuda.free(self.memory)

    def part(self, offset: int, nbytes: int, owner: object) -> DeviceMemory:
        """Return some of the bytes, which keep ``owner`` alive."""
        memory = self.memory.part(offset, offset + nbytes)
        return dataclasses.replace(memory, owner=owner)

    def quiet(self) -> QuietGpu:
        """Return when it is to be freed, by whoever may have the last reference."""
        return quiet_gpu(self.gpus.cuda, self.memory.device)

    def stream(self) -> object:
        """Return this thread's current stream: what is handed out now is for it."""
        return self.gpus.tensors.stream_of(self.memory.device)

    def fence(self, handed_out: object) -> Event:
        """Mark what was given until now to two streams of the GPU.

        They are this thread's current one and that on which a view was
        ``handed_out``. Never waits; called in any thread. Who gets it closes it.

        :raises GPUFailed: the GPU does not answer any more
        """
        tensors, current = self.gpus.tensors, self.stream()
        mark = tensors.mark(handed_out)
        return mark if current == handed_out else _Both(mark, tensors.mark(current))


class _Both:
    """Fires when both marks have fired."""

    def __init__(self, first: Event, second: Event) -> None:
        self._marks = first, second

    def record(self, stream: Stream) -> None:
        raise TypeError("two marks are recorded one by one")

    def query(self) -> bool:
        return all(mark.query() for mark in self._marks)

    def synchronize(self) -> None:
        for mark in self._marks:
            mark.synchronize()

    def export(self) -> bytes:
        raise TypeError("marks of torch's streams stay in their process")

    def close(self) -> None:
        for mark in self._marks:
            mark.close()


class IdleDevice:
    """An allocation that the arena needs no more."""

    def __init__(self, allocation: DeviceAllocation) -> None:
        self._allocation: DeviceAllocation | None = allocation

    def drop(self) -> None:
        """Let it go: freed now, or with its last view. In a thread."""
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            with allocation.quiet().allocating():
                del allocation


class DevicePages:
    """The pages of up to ``max_bytes`` of ``device``.

    ``wanted`` is called when they are needed: :meth:`make_slab`, in a thread, then
    :meth:`add_slab` are to follow, once.
    """

    def __init__(
        self, max_bytes: int, device: Device, wanted: Callable[[], None]
    ) -> None:
        self.device = device
        self.error: GPUUnavailable | GPUFailed | None = None
        """Why there is no memory of the GPU, if that is known."""
        self.is_usable = max_bytes > 0
        self._max_pages = pages_of(max_bytes)
        self._wanted = wanted
        self._allocator = PageAllocator()
        self._allocation: DeviceAllocation | None = None
        self._is_closed = False

    @property
    def allocation(self) -> DeviceAllocation:
        """What there is.

        :raises RuntimeError: it was not allocated yet, or is dropped
        """
        if self._allocation is None:
            raise RuntimeError("there is no memory of the GPU yet, or any more")
        return self._allocation

    @property
    def is_open(self) -> bool:
        """Is it allocated?"""
        return self._allocation is not None

    @property
    def nbytes(self) -> int:
        """What was allocated for regions."""
        return self._allocator.pages * PAGE_NBYTES

    @property
    def free_bytes(self) -> int:
        """What no region has of that."""
        return self._allocator.free_pages * PAGE_NBYTES

    @property
    def is_growing(self) -> bool:
        """Was it not allocated yet?"""
        return self.is_usable and self._allocator.pages < self._max_pages

    def could_ever_fit(self, sizes: Sequence[int]) -> bool:
        """Is there room for tensors of these sizes in an empty arena?"""
        return sum(pack(sizes)[0]) <= self._max_pages

    def fits(self, sizes: Sequence[int]) -> bool:
        """Would :meth:`take` have pages for tensors of these sizes now?"""
        return self._allocator.fits(pack(sizes)[0])

    def take(self, sizes: Sequence[int]) -> list[Place] | None:
        """Take pages for tensors of these sizes, all or none."""
        blocks, places = pack(sizes)
        taken = self._allocator.allocate(blocks)
        if taken is None:
            return None
        pages = [Pages(runs) for runs in taken]
        return [(pages[block], offset) for block, offset in places]

    def free(self, pages: Pages) -> None:
        """Give pages back that no region has any more."""
        for run in pages.runs:
            self._allocator.free(*run)

    def want(self) -> None:
        """Ask for the allocation, if there is none yet."""
        if self.is_growing and not self._is_closed:
            self._wanted()

    def make_slab(self) -> int | None:
        """Open CUDA and allocate, or as much as can be had; return the bytes.

        Blocks: to be called in a thread, once. While an operation there waits for a
        peer it waits too, at most 5 s. ``None``, and an :attr:`error`, if there is no
        such GPU.
        """
        try:
            gpus = self.device.opened()
            with quiet_gpu(gpus.cuda, self.device.index).allocating():
                return self._allocate(gpus)
        except (GPUUnavailable, GPUFailed) as exc:
            self.error = exc
            return None

    def add_slab(self, nbytes: int | None) -> bool:
        """Use what :meth:`make_slab` has returned; ``False`` if it is too little."""
        asked = self._max_pages
        self._max_pages = (nbytes or 0) // PAGE_NBYTES
        if nbytes is None:
            self.is_usable = False
            return False
        self._allocator.extend(self._max_pages)
        return self._max_pages >= asked

    def close(self) -> None:
        """Allocate nothing any more."""
        self._is_closed = True

    def unmap(self) -> IdleDevice | None:
        """Let the allocation go, but for those who have views; return it once."""
        allocation, self._allocation = self._allocation, None
        return None if allocation is None else IdleDevice(allocation)

    def _allocate(self, gpus: Gpus) -> int:
        nbytes = self._max_pages * PAGE_NBYTES
        while True:
            try:
                memory = gpus.cuda.malloc(nbytes + MARK_NBYTES)
            except GPUFailed:
                nbytes = nbytes // 2 // PAGE_NBYTES * PAGE_NBYTES
                if nbytes < _LEAST_NBYTES:
                    raise
            else:
                self._allocation = DeviceAllocation(gpus, memory)
                return nbytes


def _write(cuda: CudaApi, target: DeviceMemory, data: bytes) -> None:
    """Write a few bytes, and wait until they are there."""
    stream, pinned = cuda.stream(), cuda.host_alloc(len(data))
    try:
        pinned.view[:] = data
        cuda.copy(target.address, pinned.address, len(data), stream)
        stream.synchronize()
    finally:
        stream.close()
        cuda.host_free(pinned)
