"""The memory of one GPU that a buffer has: one allocation, and who has its pages.

As :mod:`asynckv.tensors.pages`, but all there is comes at once, by plain
``cudaMalloc``, and nothing lies in two places: a tensor of a GPU cannot. What is as
small as to ride with its frame on every path stays on the heap of the host, where
frames are made; it is a tensor of the GPU for whoever takes it, all the same.

A region is as those of :mod:`asynckv.tensors.paged_arena`, with one more rule: work of
the GPU goes on when the tensor it reads is gone. So where a view ends, two streams are
marked: that of the thread where it ends, and that on which it was handed out, wherever
it ends. The memory is nobody else's before the marks are reached.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import torch

from asynckv.devices.access import GpuAccess, gpu_access
from asynckv.devices.cuda import CudaApi, DeviceMemory, Event, Stream
from asynckv.devices.names import Device
from asynckv.devices.tensors import Gpus
from asynckv.errors import GPUFailed, GPUUnavailable
from asynckv.tensors.arena import Region
from asynckv.tensors.blocks import tensor_in
from asynckv.tensors.paged_arena import PagedArena, SlabRegion
from asynckv.tensors.pages import IdlePages, Pages, PagesOnDemand, Place, pack
from asynckv.tensors.runs import Memory, Runs
from asynckv.tensors.slabs import PAGE_NBYTES
from asynckv.types import TensorSpec

__all__ = (
    "MARK_NBYTES",
    "NONCE_NBYTES",
    "DeviceAllocation",
    "DeviceArena",
    "DevicePages",
    "DeviceRegion",
    "HostRegion",
    "IdleDevice",
    "ViewKeeper",
    "place_of",
    "region_behind",
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

    def quiet(self) -> GpuAccess:
        """Return when it is to be freed, by whoever may have the last reference."""
        return gpu_access(self.gpus.cuda, self.memory.device)

    def stream(self) -> object:
        """Return this thread's current stream: what is handed out now is for it."""
        return self.gpus.tensors.stream_of(self.memory.device)

    def fence(self, handed_out: object) -> Event:
        """Mark what was given until now to two streams of the GPU.

        They are this thread's current one and that on which a view was
        ``handed_out``. Never waits; called in any thread. Who gets it closes it.

        :raises GPUFailed: the GPU does not answer any more; or not in a forked child
        """
        tensors = self.gpus.tensors
        try:
            current = self.stream()
        except RuntimeError as exc:  # what torch raises there
            raise GPUFailed(f"find the current stream: {exc}") from exc
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


class DevicePages(PagesOnDemand):
    """The pages of up to ``max_bytes`` of ``device``.

    ``wanted`` is called when they are needed: :meth:`make_slab`, in a thread, then
    :meth:`add_slab` are to follow, once.
    """

    def __init__(
        self, max_bytes: int, device: Device, wanted: Callable[[], None]
    ) -> None:
        super().__init__(max_bytes, wanted)
        self.device = device
        self.error: GPUUnavailable | GPUFailed | None = None
        """Why there is no memory of the GPU, if that is known."""
        self._allocation: DeviceAllocation | None = None

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
            with gpu_access(gpus.cuda, self.device.index).allocating():
                return self._allocate(gpus)
        except (GPUUnavailable, GPUFailed) as exc:
            self.error = exc
        except Exception as exc:  # noqa: BLE001 - raised by who opens
            self.error = GPUFailed(f"{self.device.name} cannot be opened: {exc!r}")
            self.error.__cause__ = exc
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


class HostRegion(Region):
    """Memory of the host where the application is to get memory of a GPU."""

    def can_change_hands(self) -> bool:
        return False


class ViewKeeper:
    """What views of a region are based on: its life is a hold on the region.

    The GPU may still be at it when it ends, where the view was handed out for work of
    ``stream``.
    """

    __slots__ = ("_allocation", "_owner", "_stream", "region")

    def __init__(
        self,
        region: DeviceRegion,
        owner: PagedArena,
        allocation: DeviceAllocation,
        stream: object | None,
    ) -> None:
        self.region = region
        self._owner = owner
        self._allocation = allocation
        self._stream = stream

    def __del__(self) -> None:
        if self._stream is not None:
            try:
                self.region.fences.append(self._allocation.fence(self._stream))
            except GPUFailed:
                return  # nobody can know when the GPU leaves it: it stays held
        self._owner.view_ended(self.region)


class DeviceRegion(SlabRegion):
    """Memory of one tensor in one allocation on a GPU.

    ``edges`` is the digest of its first and last bytes, once it was read back.
    """

    __slots__ = ("_device_pages", "edges", "fences")

    is_on_device: ClassVar[bool] = True

    def __init__(
        self,
        nbytes: int,
        owner: PagedArena,
        pages: Pages,
        offset: int,
        generation: int,
        *,
        device_pages: DevicePages,
    ) -> None:
        super().__init__(nbytes, owner, pages, offset, generation)
        self.fences: list[Event] = []
        self.edges = b""
        self._device_pages = device_pages
        # Not the allocation: whoever still counts a region keeps no memory of a GPU.

    @property
    def start(self) -> int:
        """Where it begins in the allocation."""
        pages = self.pages
        if pages is None or not pages.runs:
            return 0
        return pages.runs[0][0] * PAGE_NBYTES + self.offset

    @property
    def is_quiet(self) -> bool:
        """Has the GPU done all it was given before the views of it ended?"""
        try:
            for fence in tuple(self.fences):  # a finalizer may add one meanwhile
                if fence.query():
                    self.fences.remove(fence)
                    fence.close()
        except GPUFailed:
            return False
        return not self.fences

    def own(self) -> bool:
        is_owned = super().own()
        if is_owned:
            self.edges = b""  # whoever had it may have filled it anew
        return is_owned

    def view(self) -> memoryview:
        raise TypeError("the memory of a GPU has no view for this process")

    def page_memory(self) -> None:
        return None

    def memory(self) -> Memory:
        raise TypeError("the memory of a GPU has no view for this process")

    def read(self) -> memoryview | None:
        return None

    def write(self, piece: memoryview) -> bool:
        return False

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor over these bytes, without a copy.

        :raises RuntimeError: the region was released
        """
        lent = self._lend(is_marked=True)
        return self._device_pages.allocation.gpus.tensors.tensor_over(lent, spec)

    def constant(self, spec: TensorSpec) -> torch.Tensor:
        """As :meth:`tensor`: a GPU has no memory that cannot be written."""
        return self.tensor(spec)

    def place(self) -> DeviceMemory:
        """Return these bytes for a copy, which keeps them.

        :raises RuntimeError: the region was released
        """
        return self._lend(is_marked=False)

    def _lend(self, *, is_marked: bool) -> DeviceMemory:
        allocation, owner = self._device_pages.allocation, self._owner
        if self.is_released or owner is None:
            raise RuntimeError("the region was released")
        stream = allocation.stream() if is_marked else None
        keeper = ViewKeeper(self, owner, allocation, stream)
        self._holds += 1
        return allocation.part(self.start, self.nbytes, keeper)


def place_of(region: Region, spec: TensorSpec) -> torch.Tensor | Runs | DeviceMemory:
    """Return what a copy of the tensor in a region reads or writes, wherever it lies.

    On the host a tensor, or the places of its bytes.

    :raises RuntimeError: the region is a GPU's, and was released
    """
    if isinstance(region, DeviceRegion):
        return region.place()
    return tensor_in(region.memory(), spec)


def region_behind(place: DeviceMemory) -> DeviceRegion | None:
    """Return the region whose :meth:`~DeviceRegion.place` that is, if it is one."""
    keeper = place.owner
    return keeper.region if isinstance(keeper, ViewKeeper) else None


_LEAST_SPARE_NBYTES: Final = 1

_MOST_COLLECTED: Final = 64
_MOST_WAITING: Final = 16
"""Of so many regions that it is at work with the GPU is asked at once, on the loop."""


class DeviceArena(PagedArena):
    """Regions in one allocation of up to ``max_bytes`` of ``device``.

    ``wanted`` is called when it is needed first: :meth:`DevicePages.make_slab`, in a
    thread, then :meth:`add_slab` are to follow. ``freed`` is called too while the GPU
    has to be asked again whether it is done with memory. ``given_back`` is called after
    each region whose memory is somebody else's from then on.
    """

    pages: DevicePages
    least_spare_nbytes = _LEAST_SPARE_NBYTES

    def __init__(
        self,
        max_bytes: int,
        device: Device,
        *,
        wanted: Callable[[], None],
        freed: Callable[[], None],
        pinned: Callable[[SlabRegion], None] = lambda region: None,
        unmapped: Callable[[IdlePages], None] = lambda idle: None,
        given_back: Callable[[], None] = lambda: None,
    ) -> None:
        pages = DevicePages(max_bytes, device, wanted)
        super().__init__(
            max_bytes, pages, freed=freed, pinned=pinned, unmapped=unmapped
        )
        self._given_back = given_back

    @property
    def is_waiting(self) -> bool:
        """Is there memory that the GPU may be at work with? Then look again."""
        return bool(self._gone)

    def collect(self) -> None:
        """As the contract says; but some at once, and of what the GPU is at few."""
        waiting = 0
        for _ in range(min(len(self._gone), _MOST_COLLECTED)):
            region = self._gone.popleft()
            if not isinstance(region, DeviceRegion) or region.is_quiet:
                region.end_hold()
                continue
            self._gone.append(region)
            waiting += 1
            if waiting == _MOST_WAITING:
                return

    def pin(self, region: SlabRegion) -> None:
        super().pin(region)
        if self.is_waiting:  # views of it may have ended before its release
            self._freed()

    def give_back(self, region: Region) -> None:
        super().give_back(region)
        self._given_back()

    def allocate_outside(self, sizes: Sequence[int]) -> list[Region]:
        return [HostRegion(nbytes, None) for nbytes in sizes]

    def _region(
        self, nbytes: int, pages: Pages, offset: int, generation: int
    ) -> DeviceRegion:
        return DeviceRegion(
            *(nbytes, self, pages, offset, generation), device_pages=self.pages
        )

    def _on_heap(self, nbytes: int) -> Region:
        return HostRegion(nbytes, self)
