"""One tensor's memory on a GPU, and who has a view of it.

As :mod:`asynckv.tensors.slab_regions`, with one more rule: work of the GPU goes on when
the tensor it reads is gone. So where a view ends, two streams are marked: that of the
thread where it ends, and that on which it was handed out, wherever it ends. The memory
is nobody else's before the marks are reached.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from asynckv.errors import GPUFailed
from asynckv.tensors.arena import Pages, Region
from asynckv.tensors.cuda import DeviceMemory, Event
from asynckv.tensors.device_pages import DeviceAllocation, DevicePages
from asynckv.tensors.runs import Memory, Runs
from asynckv.tensors.slab_regions import SlabRegion, SlabRegionOwner
from asynckv.tensors.slabs import PAGE_NBYTES
from asynckv.types import TensorSpec

__all__ = ("DeviceRegion", "HostRegion", "ViewKeeper", "region_behind")


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
        owner: SlabRegionOwner,
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
        self._owner.let_go(self.region)


class DeviceRegion(SlabRegion):
    """Memory of one tensor in one allocation on a GPU.

    ``edges`` is the digest of its first and last bytes, once it was read back.
    """

    __slots__ = ("_device_pages", "edges", "fences")

    is_on_device: ClassVar[bool] = True

    def __init__(
        self,
        nbytes: int,
        owner: SlabRegionOwner,
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

    def place(self, spec: TensorSpec) -> torch.Tensor | Runs | DeviceMemory:
        return self._lend(is_marked=False)

    def _lend(self, *, is_marked: bool) -> DeviceMemory:
        allocation, owner = self._device_pages.allocation, self._owner
        if self._is_released or owner is None:
            raise RuntimeError("the region was released")
        stream = allocation.stream() if is_marked else None
        keeper = ViewKeeper(self, owner, allocation, stream)
        self._holds += 1
        return allocation.part(self.start, self.nbytes, keeper)


def region_behind(place: DeviceMemory) -> DeviceRegion | None:
    """Return the region whose :meth:`~DeviceRegion.place` that is, if it is one."""
    keeper = place.owner
    return keeper.region if isinstance(keeper, ViewKeeper) else None
