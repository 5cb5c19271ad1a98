"""The parts of a stream as places in memory of a GPU that the peer has open.

Where they will lie is told with the offer, and of each that it lies there when it does.
All are the peer's to read until it lets them go. Plain functions; nothing here waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import msgspec

from asynckv.buffers.entries.entries import StoredEntry
from asynckv.buffers.serve_mapped import place_of
from asynckv.buffers.telling import Telling
from asynckv.errors import GPUFailed
from asynckv.links.riding import rides
from asynckv.links.sharing import MapHolder, Pin
from asynckv.protocol.values import MappedOffer, Place
from asynckv.tensors.arena import Region
from asynckv.tensors.device_regions import DeviceRegion
from asynckv.types import TensorSpec

__all__ = ("ShownSending", "reads_gpu", "show_parts")

logger = logging.getLogger(__name__)

_encoder: Final = msgspec.msgpack.Encoder()


def reads_gpu(holder: MapHolder | None) -> bool:
    """Has the peer memory of a GPU open, rather than some of the host's?"""
    return holder is not None and holder.memory_file.must_be_closed_there


def show_parts(
    entry: StoredEntry, holder: MapHolder | None, max_nbytes: int
) -> tuple[Pin, MappedOffer, bytes] | None:
    """Pin what does not ride; return how an offer says so, and how its body ends.

    ``None`` if the peer cannot read all of that where it lies, or there is nothing, or
    to say so takes more than ``max_nbytes``.
    """
    if holder is None or not reads_gpu(holder) or not holder.is_usable:
        return None
    if not entry.in_arena:
        return None
    places, shown = list[Place | None](), list[DeviceRegion]()
    for region in entry.regions[: len(entry.parts)]:
        if rides(region.nbytes):
            places.append(None)
        elif isinstance(region, DeviceRegion):
            places.append(place_of(region))
            shown.append(region)
        else:
            return None
    if not shown:
        return None
    encoded = _encoder.encode(places)
    if len(encoded) > max_nbytes:
        return None
    pin = holder.pin(shown)
    return pin, MappedOffer(pin.number, len(encoded)), encoded


class ShownSending:
    """One transfer whose parts ``holder`` reads where they lie, once it is told.

    ``lost`` is told if it has closed the memory: what it would read then may be
    another's.
    """

    def __init__(
        self, holder: MapHolder, telling: Telling, lost: Callable[[Exception], None]
    ) -> None:
        self._holder = holder
        self._telling = telling
        self._lost = lost

    def send(
        self, index: int, region: Region, spec: TensorSpec, digest: bytes | None
    ) -> None:
        """Say that a part lies there; ``digest`` is its own, if that is known."""
        if self._holder.is_connected:
            self._telling.tell(index, region, spec, digest)
        else:  # once: it ends the delivery
            logger.warning(
                "%s has closed the memory that it was shown: what it asks for from "
                "here on goes through host memory",
                self._holder.peer_id,
            )
            self._lost(GPUFailed("the peer has closed the memory that it was shown"))

    def stop(self) -> None:
        """Say nothing more."""
        self._telling.stop()
