"""The memory of a GPU, as a lookup buffer shows it to peers that have the same GPU."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import ClassVar, Final

from asynckv.protocol.digests import Digester
from asynckv.protocol.values import Place
from asynckv.tensors.arena import Region
from asynckv.tensors.device_pages import DeviceAllocation
from asynckv.tensors.device_regions import DeviceRegion

__all__ = ("LEAST_NBYTES", "ExportedMemory", "edges_in")

LEAST_NBYTES: Final = 2 * 2**20
"""Of less CUDA shows the peer what lies beside it too."""


class ExportedMemory:
    """One allocation, which is not freed while this refers to it.

    What is sent for a ticket is nothing: the connection is what counts, whose end tells
    that the peer has let everything go, or is gone.
    """

    must_be_closed_there: ClassVar[bool] = True

    def __init__(self, allocation: DeviceAllocation) -> None:
        self.handle = allocation.handle
        self.nbytes = allocation.memory.nbytes
        self.nonce = allocation.nonce
        self._allocation: DeviceAllocation | None = allocation
        self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        self.close()

    def fileno(self) -> int:
        """Return a descriptor that can be sent. It is open until :meth:`close`."""
        return self._fd

    def close(self) -> None:
        """Show it to nobody any more. Whoever holds this object holds the memory."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def drop(self) -> None:
        """Let the memory go: freed now, if the buffer has dropped it. In a thread.

        While an operation there waits for a peer it waits too, at most 5 s.
        """
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            with allocation.quiet().allocating():
                del allocation

    def edges(self, regions: Sequence[Region], places: Sequence[Place | None]) -> bytes:
        """Return the digest of the first and last bytes of what lies there.

        Empty where those of some tensor were never read back.
        """
        edges = [r.edges if isinstance(r, DeviceRegion) else b"" for r in regions]
        return edges_in(places, edges)


def edges_in(places: Sequence[Place | None], edges: Sequence[bytes]) -> bytes:
    """Return one digest of the generations, and the edges, of what has a place."""
    found = [
        (place.generation, edge)
        for place, edge in zip(places, edges, strict=True)
        if place is not None
    ]
    if not all(edge for _, edge in found):
        return b""
    digester = Digester()
    generations = [generation for generation, _ in found]
    digester.update(struct.pack(f"!{len(generations)}Q", *generations))
    for _, edge in found:
        digester.update(edge)
    return digester.digest()
