"""Memory of GPUs that are not there: numbers that stand for bytes of the heap.

What was freed reads as poison for whoever still looks at it, and is an illegal address
for who looks it up anew.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import mmap
import os
from typing import Final, TypeAlias

import numpy
import numpy.typing

from asynckv.errors import GPUFailed

__all__ = ("POISON", "AddressSpace", "Allocation", "Bytes", "shared_bytes")

POISON: Final = 0xDB
_ILLEGAL_ADDRESS: Final = 700
_FIRST_ADDRESS: Final = 1 << 60  # no host memory is there
_ALIGNMENT: Final = 512

Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]


class Allocation:
    """Some bytes, whoever has them mapped. ``users`` are copies that are under way."""

    def __init__(self, array: Bytes, device: int) -> None:
        self.array = array
        self.device = device
        self.users = 0
        self.is_gone = False
        self.file = -1
        """A memory file that holds the bytes, once they are shared."""

    def share(self) -> int:
        """Move the bytes to where other processes can map them: a descriptor."""
        if self.file < 0:
            self.file = os.memfd_create("asynckv-fake-gpu")
            os.truncate(self.file, max(self.array.nbytes, 1))
            shared = shared_bytes(self.file, self.array.nbytes)
            shared[:] = self.array
            self.array = shared
        return self.file

    def drop(self) -> None:
        """The bytes are gone; who still reads them reads poison."""
        self.array[:] = POISON
        self.is_gone = True
        if self.file >= 0:
            self.array = self.array.copy()  # a mapping keeps a descriptor of its own
            os.close(self.file)
            self.file = -1


def shared_bytes(file: int, nbytes: int) -> Bytes:
    """Map a memory file, writable."""
    return numpy.frombuffer(mmap.mmap(file, max(nbytes, 1)), numpy.uint8)[:nbytes]


class AddressSpace:
    """Which allocation is where, as one process sees it."""

    def __init__(self, number: int) -> None:
        first = _FIRST_ADDRESS + (number << 44)
        self._next = itertools.count(first, 1 << 34)
        self._bases: list[int] = []
        self._mapped: list[Allocation] = []
        self._users: collections.Counter[Allocation] = collections.Counter()

    def note(self, allocation: Allocation, copies: int) -> None:
        """So many more copies of this process are under way there, or less."""
        self._users[allocation] += copies
        if not self._users[allocation]:
            del self._users[allocation]

    def uses(self, allocation: Allocation) -> bool:
        """Whether a copy of this process is under way there."""
        return allocation in self._users

    def map(self, allocation: Allocation, address: int | None = None) -> int:
        """Give an allocation an address: its own, of the host, or any."""
        base = next(self._next) if address is None else address
        place = bisect.bisect(self._bases, base)
        self._bases.insert(place, base)
        self._mapped.insert(place, allocation)
        return base

    def unmap(self, base: int) -> Allocation:
        """Forget what begins there.

        :raises GPUFailed: nothing does
        """
        place = bisect.bisect_left(self._bases, base)
        if place == len(self._bases) or self._bases[place] != base:
            raise GPUFailed(f"nothing begins at {base:#x}", code=1)
        del self._bases[place]
        return self._mapped.pop(place)

    def find(self, address: int, nbytes: int) -> tuple[Allocation, int]:
        """Return whose bytes these are, and where in it they begin.

        :raises GPUFailed: they are nobody's, or not all of one allocation
        """
        place = bisect.bisect(self._bases, address) - 1
        if place >= 0:
            allocation, base = self._mapped[place], self._bases[place]
            is_within = address + nbytes <= base + allocation.array.nbytes
            if is_within and not allocation.is_gone:
                return allocation, address - base
        raise GPUFailed(
            f"an illegal address: {address:#x}, {nbytes} bytes", code=_ILLEGAL_ADDRESS
        )

    def bases_of(self, allocation: Allocation) -> list[int]:
        """Where an allocation is mapped."""
        pairs = zip(self._bases, self._mapped, strict=True)
        return [base for base, mapped in pairs if mapped is allocation]

    def allocations(self) -> list[Allocation]:
        """All that is mapped."""
        return list(self._mapped)
