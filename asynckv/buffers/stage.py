"""Memory of the host in which peers read what a buffer has on its GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asynckv.links.sharing import Sharing
from asynckv.tensors.growth import Growth
from asynckv.tensors.slab_arena import SlabArena
from asynckv.tensors.slab_regions import SlabRegion

__all__ = ("STAGE_NBYTES", "Stage")

STAGE_NBYTES: Final = 2**30
"""Of one buffer, for all its peers; no more than the buffer has itself."""


class Stage:
    """Up to ``max_bytes`` of memory that peers of this host map, got as it is needed.

    ``sharing`` shows it to them. What one of them has of it is nobody else's until it
    says so, or is gone; whoever finds no room does without.
    """

    def __init__(self, max_bytes: int) -> None:
        self._growth = Growth(max_bytes)
        self._arena = self._growth.arena
        self.sharing = Sharing(self._arena, lambda: None, self._growth.drop_soon)

    @property
    def used_bytes(self) -> int:
        """Bytes of copies that are made now, or that peers may have views of."""
        return self._arena.used_bytes + self._arena.pinned_bytes

    @property
    def late_views(self) -> int:
        """How many views have kept memory for 10 s after their delivery's end."""
        return self._growth.late_views

    async def take(self, sizes: Sequence[int]) -> list[SlabRegion] | None:
        """Return a region a size, to be released; ``None`` if there is no room now.

        Waits for nobody's memory, but for a slab that is under way. A cancelled call
        leaves no trace.
        """
        arena = self._arena
        if not isinstance(arena, SlabArena):
            return None
        while not arena.is_closed and arena.could_ever_fit(sizes):
            regions = arena.allocate(sizes)
            if regions is not None:
                shared = [r for r in regions if isinstance(r, SlabRegion)]
                if len(shared) == len(sizes):
                    return shared
                arena.free(regions)  # there is no memory that could be shared
                return None
            if not await self._growth.grown():
                return None
        return None

    def close(self) -> None:
        """Use it no more. What peers have of it stays theirs. Never waits."""
        self.sharing.close()
        self._growth.close()

    async def aclose(self) -> None:
        """Wait until no thread is at it."""
        await self.sharing.aclose()
        await self._growth.aclose()
