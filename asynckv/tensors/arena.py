"""Where a buffer's bytes live: the seam between admission and memory.

A buffer asks its arena for regions, one a tensor, and never counts bytes
itself. :class:`HeapArena` takes them from the heap; shared and device memory
stand behind the same class.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Final

import torch

from asynckv.tensors.views import bytes_of, tensor_over
from asynckv.types import TensorSpec

__all__ = ("Arena", "HeapArena", "Region")

_SMALL_NBYTES: Final = 4096


class Region:
    """Memory of one tensor, charged to an arena until it is released or detached.

    It is made when it is first looked at.
    """

    __slots__ = ("_arena", "_make", "_view", "nbytes")

    def __init__(
        self,
        nbytes: int,
        make: Callable[[int], memoryview],
        arena: Arena | None,
    ) -> None:
        self.nbytes = nbytes
        self._make = make
        self._arena = arena
        self._view: memoryview | None = None

    def view(self) -> memoryview:
        """Return the bytes, writable, without a copy."""
        if self._view is None:
            self._view = self._make(self.nbytes)
        return self._view

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor over these bytes, without a copy."""
        return tensor_over(self.view(), spec)

    def release(self) -> None:
        """Give the charge back to the arena. A second call does nothing.

        Heap memory itself lives as long as anything refers to it.
        """
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.discharge(self.nbytes)

    def charge_to(self, arena: Arena) -> None:
        """Charge memory that belonged to nobody to ``arena``."""
        self._arena = arena


class Arena(abc.ABC):
    """A hard bound on bytes and the memory below it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.peak_bytes = 0

    def could_ever_fit(self, sizes: Sequence[int]) -> bool:
        """Would regions of these sizes fit if the arena were empty?"""
        return sum(sizes) <= self.max_bytes

    def fits(self, sizes: Sequence[int]) -> bool:
        """Would regions of these sizes fit now?"""
        return self.used_bytes + sum(sizes) <= self.max_bytes

    def allocate(self, sizes: Sequence[int]) -> list[Region] | None:
        """Take one region a size, all or none. Never waits."""
        if not self.fits(sizes):
            return None
        regions = [Region(nbytes, self._memory, self) for nbytes in sizes]
        self._charge(sum(sizes))
        return regions

    def allocate_outside(self, sizes: Sequence[int]) -> list[Region]:
        """Make regions that are charged to nobody here (a consumer pays for them)."""
        return [Region(nbytes, self._memory, None) for nbytes in sizes]

    def adopt(self, regions: Sequence[Region]) -> bool:
        """Charge regions from :meth:`allocate_outside` to this arena, if they fit."""
        sizes = [region.nbytes for region in regions]
        if not self.fits(sizes):
            return False
        for region in regions:
            region.charge_to(self)
        self._charge(sum(sizes))
        return True

    def free(self, regions: Sequence[Region]) -> None:
        """Release every one of ``regions``."""
        for region in regions:
            if region._arena is not None:
                region._arena = None
                self.used_bytes -= region.nbytes

    def discharge(self, nbytes: int) -> None:
        """Called by a region that is released."""
        self.used_bytes -= nbytes

    def _charge(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    @abc.abstractmethod
    def _memory(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` of new memory, writable."""


class HeapArena(Arena):
    """Regions from the process's heap."""

    def _memory(self, nbytes: int) -> memoryview:
        if nbytes <= _SMALL_NBYTES:  # far cheaper to make and to free
            return memoryview(bytearray(nbytes))
        return bytes_of(torch.empty(nbytes, dtype=torch.uint8))
