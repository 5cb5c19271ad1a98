"""One tensor's memory in the slabs, and who has a view of it.

A region's memory is somebody else's only when the region was released *and* the
last tensor or view of it is gone, wherever that is: each hold on it ends by the
finalizer of what the views are based on. That may run in any thread and at any
moment, so it only notes the region; the owner's thread does the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

import numpy
import numpy.typing
import torch

from asynckv.tensors.arena import Hold, Region, heap_memory
from asynckv.tensors.pages import SHARED_PAGES_BELOW, Pages
from asynckv.tensors.runs import Memory, runs_at
from asynckv.tensors.slabs import PAGE_NBYTES
from asynckv.tensors.views import tensor_over
from asynckv.types import TensorSpec

__all__ = (
    "LATE_S",
    "LateViews",
    "SlabRegion",
    "SlabRegionOwner",
)


_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]


class SlabRegionOwner(Protocol):
    """The arena, as its regions see it."""

    def memory_of(self, region: SlabRegion, *, writable: bool) -> _Bytes:
        """Return a region's bytes, without a hold on it.

        :raises OSError: they lie apart, and cannot be mapped together
        """

    def spans_of(self, region: SlabRegion) -> tuple[_Bytes, Sequence[tuple[int, int]]]:
        """Return all memory, and where a region's bytes begin and end in it."""

    def view_ended(self, region: SlabRegion) -> None:
        """A view is gone. Called by finalizers: in any thread, at any moment."""

    def collect(self) -> None:
        """Take memory back that was let go of."""

    def pin(self, region: SlabRegion) -> None:
        """A region was released while somebody has a view."""

    def unpin(self, region: SlabRegion) -> None:
        """Its memory was given back, or has an owner again."""

    def give_back(self, region: Region) -> None:
        """A region was released, and nobody holds it."""


class _Window:
    """What the views of one region are based on: its life is a hold on the region."""

    __slots__ = ("__array_interface__", "_memory", "_owner", "_region")

    def __init__(
        self, region: SlabRegion, owner: SlabRegionOwner, memory: _Bytes
    ) -> None:
        self._region = region
        self._owner = owner
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._owner.view_ended(self._region)


class _PeerHold(Hold):
    __slots__ = ("_slab_region",)

    def __init__(self, region: SlabRegion) -> None:
        super().__init__(region)
        self._slab_region = region

    def release(self) -> None:
        if self._region is not None:
            self._region = None
            self._slab_region.end_peers_hold()


class SlabRegion(Region):
    """Memory of one tensor in the slabs, at ``offset`` of its ``pages``.

    ``generation`` differs between all regions that an arena has ever had.
    """

    __slots__ = (
        "__weakref__",
        "_owner",
        "_peers",
        "generation",
        "is_borrowed",
        "is_handed_out",
        "is_kept",
        "offset",
    )

    is_shared = True

    def __init__(
        self,
        nbytes: int,
        owner: SlabRegionOwner,
        pages: Pages,
        offset: int,
        generation: int,
    ) -> None:
        super().__init__(nbytes, None)
        self.pages = pages
        self.offset = offset
        self.generation = generation
        self.is_handed_out = False
        """Do its last views belong to the application, which nobody charges?"""
        self.is_kept = False
        """Has a forked child views too, whose end nobody here learns of?"""
        self.is_borrowed = False
        """Was it made for somebody who may insert it, and has not yet?"""
        self._owner: SlabRegionOwner | None = owner
        self._peers = 0
        pages.left += 1

    def view(self) -> memoryview:
        """Return the bytes, writable, without a copy; scratch once it is released.

        :raises OSError: they lie apart, and the process may have no more mappings
        """
        owner = self._owner
        if self._is_released or owner is None:
            return heap_memory(self.nbytes)
        # Not kept here: it holds this region.
        return self._held(owner, owner.memory_of(self, writable=True)).data

    def memory(self) -> Memory:
        owner, pages = self._owner, self.pages
        if self._is_released or owner is None or pages is None or len(pages.runs) < 2:
            return self.view()
        base, spans = owner.spans_of(self)
        return runs_at(self._held(owner, base).data, spans)

    def page_memory(self) -> Memory | None:
        owner = self._owner
        if self._is_released or owner is None or self.nbytes < SHARED_PAGES_BELOW:
            return None
        base, spans = owner.spans_of(self)
        *others, (start, stop) = spans
        pages = [*others, (start, -(-stop // PAGE_NBYTES) * PAGE_NBYTES)]
        return runs_at(self._held(owner, base).data, pages)

    def constant(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor over these bytes that must never be written: a crash."""
        owner = self._owner
        if self._is_released or owner is None:
            raise RuntimeError("the region was released")
        memory = owner.memory_of(self, writable=False)
        return tensor_over(self._held(owner, memory), spec)

    def can_change_hands(self) -> bool:
        owner = self._owner
        if self._is_released or owner is None:
            return False
        owner.collect()
        return not self._holds

    def hand_out(self) -> None:
        self.is_handed_out = True

    @property
    def is_released(self) -> bool:
        """Has it no owner any more, but those of its views?"""
        return self._is_released

    @property
    def is_pinned(self) -> bool:
        """Is it kept from others, although it was released, and counts for that?"""
        return self._is_released and self._owner is not None and not self.is_handed_out

    @property
    def is_quiet(self) -> bool:
        """Is nothing at work with it any more that outlives a view?"""
        return True

    @property
    def has_views(self) -> bool:
        """May somebody in this process have one?"""
        return self._holds > self._peers

    @property
    def is_read_by_peers(self) -> bool:
        """May another process read there?"""
        return self._peers > 0

    def hold(self) -> Hold:
        """As the contract says: for peers, who have their views elsewhere."""
        self._holds += 1
        self._peers += 1
        return _PeerHold(self)

    def end_peers_hold(self) -> None:
        """The hold of one peer is over."""
        self._peers -= 1
        self.end_hold()

    def own(self) -> bool:
        """Undo a release that is not over yet; ``False`` if there is none."""
        if not self._is_released or self._owner is None:
            return False
        self._is_released = self.is_borrowed = False
        self._owner.unpin(self)
        return True

    def release(self) -> None:
        owner = self._owner
        if owner is not None and not self._is_released:
            self._is_released = True
            owner.collect()
            self._give_back_if_over()
            if self._owner is not None:
                owner.pin(self)

    def charge_to(self, arena: object) -> None:
        raise RuntimeError("a region of the slabs is charged from the start")

    def _give_back_if_over(self) -> None:
        owner = self._owner
        if owner is None or self._holds or not self._is_released:
            return
        if self.is_kept:
            owner.unpin(self)
            self.is_handed_out = True  # for good: it must not count for ever
            owner.pin(self)
        else:
            self._owner = None
            owner.give_back(self)

    def _held(self, owner: SlabRegionOwner, memory: _Bytes) -> _Bytes:
        self._holds += 1
        return numpy.asarray(_Window(self, owner, memory))


logger = logging.getLogger(__name__)

LATE_S: Final = 10.0


class LateViews:
    """Counts regions whose views are still there 10 s after they were released."""

    def __init__(self) -> None:
        self.count = 0
        self._watched: dict[SlabRegion, float] = {}
        """When each is late, the first one first."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    def watch(self, region: SlabRegion) -> None:
        """A region was released while somebody has a view. Never waits."""
        self._watched.pop(region, None)
        self._forget_unpinned()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # released after the loop's end
            return
        if not self._is_stopped:
            self._watched[region] = loop.time() + LATE_S
            self._recheck_later(loop)

    def stop(self) -> None:
        """Watch no more. Never waits."""
        self._is_stopped = True
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _recheck_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None and self._watched:
            self._timer = loop.call_at(
                next(iter(self._watched.values())), self._recheck
            )

    def _recheck(self) -> None:
        self._timer, loop = None, asyncio.get_running_loop()
        late = [r for r, at in self._watched.items() if at <= loop.time()]
        for region in late:
            del self._watched[region]
        sizes = [region.nbytes for region in late if region.is_pinned]
        self.count += len(sizes)
        if sizes:
            logger.warning(
                "views of %d tensors (%d bytes) have been kept for %g s after their "
                "entries left: nothing else can use that memory",
                len(sizes),
                sum(sizes),
                LATE_S,
            )
        self._forget_unpinned()
        self._recheck_later(loop)

    def _forget_unpinned(self) -> None:
        while self._watched:
            region = next(iter(self._watched))
            if region.is_pinned:
                return
            del self._watched[region]
