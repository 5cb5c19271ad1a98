"""An entry's tensors as places in a file that the peer has mapped.

Plain functions; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from asynckv.buffers.entries.entries import StoredEntry
from asynckv.buffers.manifest import INLINE_NBYTES
from asynckv.links.sharing import MapHolder, Pin
from asynckv.protocol.values import MappedOffer, Place
from asynckv.tensors.arena import Region
from asynckv.tensors.slab_regions import SlabRegion
from asynckv.tensors.slabs import PAGE_NBYTES

__all__ = (
    "Shown",
    "can_be_mapped",
    "map_entry",
    "place_of",
)

_encoder: Final = msgspec.msgpack.Encoder()


class Shown(NamedTuple):
    """A whole entry as every peer is told of it who maps the arena.

    ``edges`` stay those of the first time: memory that changes later is noticed.
    """

    regions: Sequence[SlabRegion]
    places: bytes
    edges: bytes


def can_be_mapped(entry: StoredEntry, holder: MapHolder | None) -> bool:
    """Will the peer read the entry where it lies, once it is whole?

    What is on the heap rides along, if it is little.
    """
    if holder is None or not holder.is_usable or entry.is_small or not entry.in_arena:
        return False
    regions = entry.regions[: len(entry.parts)]
    others = [r.nbytes for r in regions if not isinstance(r, SlabRegion)]
    return len(others) < len(regions) and sum(others) <= INLINE_NBYTES


def map_entry(entry: StoredEntry, holder: MapHolder) -> tuple[Pin, MappedOffer, bytes]:
    """Pin a whole entry; return how an offer says so, and how its body ends."""
    regions = entry.regions[: len(entry.parts)]
    shown = entry.shown = entry.shown or _show(regions, holder)
    pin = holder.pin(shown.regions)
    mapped = MappedOffer(pin.number, len(shown.places), shown.edges)
    return pin, mapped, b"".join((shown.places, *_heap_bytes(regions)))


def _show(regions: Sequence[Region], holder: MapHolder) -> Shown:
    places = [place_of(region) for region in regions]
    shared = [region for region in regions if isinstance(region, SlabRegion)]
    edges = holder.memory_file.edges(regions, places)
    return Shown(shared, _encoder.encode(places), edges)


def place_of(region: Region) -> Place | None:
    """Return where a region's bytes are in the file; ``None`` if they are not."""
    if not isinstance(region, SlabRegion) or region.pages is None:
        return None
    runs = region.pages.runs
    return Place(
        tuple([(first * PAGE_NBYTES, pages * PAGE_NBYTES) for first, pages in runs]),
        region.offset,
        region.generation,
    )


def _heap_bytes(regions: Sequence[Region]) -> list[memoryview]:
    return [r.view() for r in regions if not isinstance(r, SlabRegion)]
