"""An arena, and the thread that lets it grow while others wait for room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Final, ParamSpec, TypeAlias, TypedDict

import torch

from asynckv.affinity import watch_forks
from asynckv.devices.access import PATIENCE_S
from asynckv.devices.arena import (
    DeviceAllocation,
    DeviceArena,
    DevicePages,
    DeviceRegion,
)
from asynckv.devices.copying import CopyPool
from asynckv.devices.lanes import DeviceLanes
from asynckv.devices.names import Device
from asynckv.devices.tensors import KVOnGpu
from asynckv.errors import GPUFailed
from asynckv.tensors.arena import Arena, HeapArena, Region
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.late_views import LateViews
from asynckv.tensors.paged_arena import PagedArena, SlabArena, SlabRegion
from asynckv.tensors.pages import IdlePages
from asynckv.tensors.slabs import has_slabs
from asynckv.tensors.views import empty_tensor
from asynckv.types import TensorSpec

__all__ = (
    "Growth",
    "SpareMemory",
    "allocate_but",
)


class SpareMemory:
    """Lends memory of ``arena``, and knows again what was lent.

    ``ordinary`` makes the tensors that are not there, on the host by default.
    """

    def __init__(
        self,
        arena: PagedArena | HeapArena,
        ordinary: Callable[[TensorSpec], torch.Tensor] | None = None,
    ) -> None:
        self._make_ordinary = ordinary
        self._slabs = arena if isinstance(arena, PagedArena) else None
        self._lent: weakref.WeakValueDictionary[int, SlabRegion] = (
            weakref.WeakValueDictionary()
        )
        """Regions of tensors that :meth:`empty` has returned, by their addresses."""

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor that is charged as long as it lives.

        An ordinary one where it is small, or there is no room for it now.
        """
        slabs = self._slabs
        if slabs is None or slabs.is_closed:
            return self._ordinary(spec)
        (region,) = slabs.allocate([spec.nbytes]) or (None,)
        tensor = None
        if isinstance(region, SlabRegion):
            tensor = _tensor_in(region, spec)
        if tensor is None or not isinstance(region, SlabRegion):
            slabs.free([] if region is None else [region])
            return self._ordinary(spec)
        self._lent[tensor.data_ptr()] = region
        region.is_borrowed = True
        region.release()
        return tensor

    def spare(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor for the application, charged to nobody.

        In memory that comes back, where enough of it lies idle, else an ordinary one.
        """
        return self.spare_region(spec)[0]

    def spare_region(self, spec: TensorSpec) -> tuple[torch.Tensor, SlabRegion | None]:
        """As :meth:`spare`; return its region too, if it is not an ordinary one."""
        slabs = self._slabs
        taken = None if slabs is None else slabs.take_spares([spec.nbytes])
        if taken is None:
            return self._ordinary(spec), None
        (region,) = taken
        tensor = _tensor_in(region, spec)
        if tensor is None:
            region.release()
            return self._ordinary(spec), None
        region.hand_out()
        region.release()
        return tensor, region

    def _ordinary(self, spec: TensorSpec) -> torch.Tensor:
        make = self._make_ordinary
        return empty_tensor(spec) if make is None else make(spec)

    def regions_of(
        self, tensors: Iterable[KVMemory | KVOnGpu]
    ) -> tuple[SlabRegion | None, ...]:
        """Return for each tensor from :meth:`empty` the region that is all of it.

        ``None`` for any other tensor, and for one whose region has an owner;
        nothing where there is none from :meth:`empty` at all.
        """
        return tuple(map(self._region_of, tensors)) if self._lent else ()

    def _region_of(self, tensor: KVMemory | KVOnGpu) -> SlabRegion | None:
        if isinstance(tensor, KVOnGpu):
            tensor = tensor.tensor
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return None
        region = self._lent.get(tensor.data_ptr())
        if region is None or not region.is_released or region.is_handed_out:
            return None
        is_whole = tensor.nbytes == region.nbytes and tensor.is_contiguous()
        is_plain = not (tensor.is_conj() or tensor.is_neg())
        return region if is_whole and is_plain else None


def _tensor_in(region: SlabRegion, spec: TensorSpec) -> torch.Tensor | None:
    """Return a tensor there; ``None`` if the process may have no more mappings."""
    try:
        return region.tensor(spec)
    except OSError:
        return None


def allocate_but(
    lent: Sequence[SlabRegion | None],
    arena: Arena,
    sizes: Sequence[int],
    charged: int,
) -> list[Region] | None:
    """Take one region a size, all or none, but for those that are there already."""
    owned = {
        index: region
        for index, region in enumerate(lent)
        if region is not None and region.own()
    }
    others = [nbytes for index, nbytes in enumerate(sizes) if index not in owned]
    regions = arena.allocate(others, charged)
    if regions is None:
        arena.free(list(owned.values()))
        return None
    for index, region in owned.items():  # in rising order
        regions.insert(index, region)
    return regions


logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_LOOK_AGAIN_S: Final = 1e-3
_SETTLE_LOOKS: Final = 1000
_CLOSE_S: Final = PATIENCE_S + 1.0
"""Memory is dropped after so long a wait for operations of peers, at the latest."""


class _Told(TypedDict):
    wanted: Callable[[], None]
    freed: Callable[[], None]
    pinned: Callable[[SlabRegion], None]
    unmapped: Callable[[IdlePages], None]


_Slab: TypeAlias = asyncio.Future[int | None]


class Growth:
    """Owns an ``arena`` of ``max_bytes``, and gets a slab whenever it asks for one.

    ``changed`` is called, on the loop, when there may be room that nobody left:
    a slab is there or cannot be had, or a view of released memory is gone.
    """

    def __init__(
        self,
        max_bytes: int,
        changed: Callable[[], None] = lambda: None,
        device: Device | None = None,
    ) -> None:
        self._slabs: PagedArena | None = None
        self._late = LateViews()
        self.device_pages: DevicePages | None = None
        """Of an arena on a GPU."""
        told: _Told = {
            "wanted": _weakly(self._grow_soon),
            "freed": _weakly(self._recheck_soon),
            "pinned": _weakly(self._late.watch),
            "unmapped": _weakly(self.drop_soon),
        }
        if device is not None:
            self._slabs = on_device = DeviceArena(
                max_bytes, device, **told, given_back=_weakly(self._given_back)
            )
            self.device_pages = on_device.pages
        elif has_slabs():
            self._slabs = SlabArena(max_bytes, **told)
            watch_forks(self._slabs)
        self.arena = self._slabs or HeapArena(max_bytes)
        self.spares = SpareMemory(self.arena, None if device is None else device.empty)
        self._changed = changed
        self._call_when_given_back: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._growing: _Slab | None = None
        self._dropping: set[asyncio.Future[None]] = set()
        self._is_looking = False

    @property
    def open_device(self) -> Device | None:
        """The GPU that the memory is on, once there is some."""
        pages = self.device_pages
        return None if pages is None or not pages.is_open else pages.device

    @property
    def allocation(self) -> DeviceAllocation | None:
        """That memory, if it is a GPU's. Whoever keeps it keeps it allocated."""
        pages = self.device_pages
        return None if pages is None or not pages.is_open else pages.allocation

    @property
    def late_views(self) -> int:
        """How many views have kept memory for 10 s after their entry's end."""
        return self._late.count

    def take_on_device(self, sizes: Sequence[int]) -> list[DeviceRegion] | None:
        """Take memory of the GPU for each, if there is so much of it now. Never waits.

        Whoever gets it releases it.
        """
        regions = None
        if self._slabs is not None and self.open_device is not None:
            regions = self._slabs.take_spares(sizes)
        if regions is None:
            return None
        return [region for region in regions if isinstance(region, DeviceRegion)]

    def call_when_given_back(self, callback: Callable[[], None]) -> None:
        """Call back when memory of a GPU may be free; it must not take any then."""
        self._call_when_given_back = callback

    def awaits(self, nbytes: int) -> bool:
        """Is a slab under way without which so many spare bytes are not there?

        Asks for one, if there can be one more. :meth:`changed` is called next.
        """
        slabs = self._slabs
        if slabs is None or slabs.has_spare(nbytes):
            return False
        slabs.pages.want()
        return self._growing is not None

    async def reach(self, nbytes: int) -> None:
        """Wait for slabs, if there can be more, until so many bytes are spare.

        A cancelled call leaves no trace.
        """
        while self.awaits(nbytes):
            await self.grown()

    async def grown(self) -> bool:
        """Wait for the slab that is under way; ``False`` if none is.

        A cancelled call leaves no trace.
        """
        if self._growing is None:
            return False
        await asyncio.wait({self._growing})
        return True

    def make_pool(self) -> CopyPool:
        """Make what copies into this memory and out of it."""
        pages, empty = self.device_pages, self.spares.spare
        if pages is None:
            return CopyPool(empty=empty)
        lanes = DeviceLanes.of(lambda: pages.allocation.gpus)
        return CopyPool(device=pages.device, empty=empty, lanes=lanes)

    async def open(self) -> None:
        """Wait until the memory of a GPU is allocated, if it is to be one's.

        A cancelled call leaves no trace: the next one waits for the same.

        :raises GPUUnavailable: CuPy, a driver or the GPU is missing
        :raises GPUFailed: it has no memory left, or cannot be opened
        """
        pages = self.device_pages
        if pages is None or pages.is_open:
            return
        pages.want()
        if self._growing is not None:
            await asyncio.wait({self._growing})
        if pages.error is not None or not pages.is_usable:
            raise pages.error or GPUFailed("the process can have no more threads")

    def close(self) -> None:
        """Get no more slabs; one under way ends soon. Never waits."""
        self._late.stop()
        self.arena.close()

    async def aclose(self) -> None:
        """Wait until no thread is at a slab. The memory of views stays theirs.

        Waits at most 1 s for a GPU to be done with views that have ended, then 6 s for
        CUDA to allocate and free, which may take for ever: the threads go on.
        """
        self.close()
        await self._settle()
        limit_s = None if self.device_pages is None else _CLOSE_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                if self._growing is not None:
                    await asyncio.wait({self._growing})
                if self._dropping:
                    await asyncio.wait(self._dropping)

    async def _settle(self) -> None:
        arena = self._slabs
        if not isinstance(arena, DeviceArena):
            return
        arena.collect()
        for _ in range(_SETTLE_LOOKS):
            if not arena.is_waiting:
                return
            await asyncio.sleep(_LOOK_AGAIN_S)  # nobody is told when a GPU is done
            arena.collect()

    def _grow_soon(self) -> None:
        if self._growing is not None:
            return
        loop = self._loop = asyncio.get_running_loop()
        self._growing = slab = loop.create_future()
        slab.add_done_callback(self._add_slab)
        if not _start(self._make_slab, loop, slab):
            slab.set_result(None)

    def _make_slab(self, loop: asyncio.AbstractEventLoop, slab: _Slab) -> None:
        nbytes: int | None = 0
        arena = self._slabs
        try:
            if arena is not None:
                nbytes = arena.pages.make_slab()
        finally:
            try:
                loop.call_soon_threadsafe(slab.set_result, nbytes)
            except RuntimeError:  # the loop is closed: nobody else would drop it
                if arena is not None:
                    arena.add_slab(nbytes)

    def _given_back(self) -> None:
        self._call_when_given_back()

    def _add_slab(self, slab: _Slab) -> None:
        self._growing = None
        if self._slabs is not None and not slab.cancelled():
            self._slabs.add_slab(slab.result())
            self._changed()

    def drop_soon(self, idle: IdlePages) -> None:
        """Let memory go in a thread: the system takes its time to clear it."""
        loop = self._loop
        if loop is None or loop.is_closed():
            idle.drop()
            return
        dropped: asyncio.Future[None] = loop.create_future()
        self._dropping.add(dropped)
        dropped.add_done_callback(self._dropping.discard)
        if not _start(_drop, idle, loop, dropped):
            idle.drop()
            dropped.set_result(None)

    def _recheck_soon(self) -> None:
        """Called by finalizers: in any thread, at any moment."""
        loop = self._loop
        if loop is None or self._is_looking:
            return  # nobody has ever waited for room, or it will be seen anyway
        self._is_looking = True
        try:
            loop.call_soon_threadsafe(self._recheck)
        except RuntimeError:  # the loop is closed
            self._is_looking = False

    def _recheck(self) -> None:
        self._is_looking = False  # what comes from here on is looked at again
        arena = self._slabs
        if arena is not None:
            arena.collect()
            if isinstance(arena, DeviceArena) and arena.is_waiting and self._loop:
                # A GPU says to nobody when it is done: it has to be asked.
                self._is_looking = True
                self._loop.call_later(_LOOK_AGAIN_S, self._recheck)
        self._changed()


def _weakly(method: Callable[_P, None]) -> Callable[_P, None]:
    """Call ``method`` as long as its object lives.

    Every view refers to its arena: what that would keep alive, be it the loop and all
    its tasks, may hold the view, and through a tensor's memory the garbage collector
    sees no cycle.
    """
    ref = weakref.WeakMethod(method)

    def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
        alive = ref()
        if alive is not None:
            alive(*args, **kwargs)

    return call


def _start(work: Callable[..., None], *args: object) -> bool:
    """Let a thread of its own do ``work``; ``False`` if there is none.

    There are few. No daemon, because one that is in the kernel while the
    interpreter ends takes the process down.
    """
    thread = threading.Thread(target=work, args=args, name="asynckv-slab", daemon=False)
    try:
        thread.start()
    except RuntimeError:  # the process has as many threads as it may
        logger.exception("no thread for shared memory")
        return False
    return True


def _drop(
    idle: IdlePages, loop: asyncio.AbstractEventLoop, dropped: asyncio.Future[None]
) -> None:
    try:
        idle.drop()
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(dropped.set_result, None)
