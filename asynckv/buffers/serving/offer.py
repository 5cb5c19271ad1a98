"""One delivery on its way to a peer: the offer, then the parts that do not ride along.

Its tensors may be places in a file that the peer has mapped, or in memory of a GPU that
the peer has open: where they will lie is told with the offer, and of each that it lies
there when it does. All are the peer's to read until it lets them go. Plain functions;
nothing here waits or knows how a delivery ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

import msgspec

from asynckv.buffers.entries.entries import Lease, Shown, StoredEntry
from asynckv.errors import GPUFailed, RemoteProtocolError
from asynckv.links.gpu_link import GpuLink
from asynckv.links.link import Link
from asynckv.links.requests import LinkStream
from asynckv.protocol.frames import Complete, Offer, Retract
from asynckv.protocol.transfer_frames import Done, GrantDevices
from asynckv.protocol.values import MappedOffer, Place
from asynckv.sharing.owner import MapHolder, Pin
from asynckv.tensors.arena import Region
from asynckv.tensors.device_regions import DeviceRegion
from asynckv.tensors.feeds import Feed
from asynckv.tensors.runs import Memory, joined
from asynckv.tensors.slab_regions import SlabRegion
from asynckv.tensors.slabs import PAGE_NBYTES
from asynckv.transfers.eager import RidingParts, rides
from asynckv.transfers.host_copies import HostCopy
from asynckv.transfers.manifest import INLINE_NBYTES, check_body
from asynckv.transfers.outgoing import DigestPart, GpuSending, Telling
from asynckv.types import TensorSpec

__all__ = (
    "Hoist",
    "Offering",
    "ShownSending",
    "can_be_mapped",
    "make_offer",
    "map_entry",
    "may_begin",
    "place_of",
    "reads_gpu",
    "show_parts",
)


_encoder: Final = msgspec.msgpack.Encoder()


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


logger = logging.getLogger(__name__)


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


Hoist: TypeAlias = Callable[
    [Region, TensorSpec, Callable[[HostCopy], None]], "asyncio.Task[None]"
]
"""Copies one part to host memory, off the loop, and calls back with the copy: when it
is whole, or with a feed when it has begun.

Cancelled, it does not call back any more, and a feed is fed no further.
"""


def may_begin(
    entry: StoredEntry, holder: MapHolder | None = None, *, streams: bool
) -> bool:
    """May an offer go out before the entry is whole?

    A stream shows what it gets: it must not see a plain insert that can still
    be withdrawn. What is small rides with its offer, once it is whole; what will be
    read where it lies is read then.
    """
    if streams:
        return entry.draft.streaming
    return not entry.is_small and not can_be_mapped(entry, holder)


def make_offer(
    link: Link,
    stream: LinkStream,
    lease: Lease,
    holder: MapHolder | None = None,
    *,
    hoist: Hoist | None = None,
    reader: MapHolder | None = None,
) -> Offering:
    """Offer what was leased, with its bytes if they are small and all there.

    A ``holder`` who has the memory open is told where they lie; the ``reader`` of a
    stream, where parts will lie as they come. ``hoist`` brings what is on a GPU to the
    host, for lanes.

    :raises EntryTooLarge: its tokens, roi and names do not fit in a frame
    """
    entry = lease.entry
    body, inline, shown = _body_of(link, entry, holder, reader)
    pin, mapped = (None, None) if shown is None else shown
    try:
        check_body(link.limits.max_body_bytes, body)
    except BaseException:
        keeper = holder if reader is None else reader
        if keeper is not None and pin is not None:
            keeper.unpin(pin.number)
        raise
    offering = Offering(
        *(link, stream, entry, link.new_transfer()),
        pin=pin,
        reader=reader if pin is not None else None,
        hoist=hoist,
    )
    offer = Offer(
        transfer=offering.transfer,
        inline=inline,
        entry_id=entry.entry_id,
        token=lease.token,
        attempt=lease.attempt,
        matched_tokens=lease.matched_tokens,
        on_gpu=_is_on_gpu(entry),
        complete=entry.complete,
        mapped=mapped,
    )
    stream.send(offer, body)
    return offering


def _body_of(
    link: Link,
    entry: StoredEntry,
    holder: MapHolder | None,
    reader: MapHolder | None,
) -> tuple[bytes, bool, tuple[Pin, MappedOffer] | None]:
    """Return what an offer says, whether the bytes are in it, and what was pinned."""
    body, shown = entry.preamble(), None
    if entry.complete and entry.is_small and (pieces := _pieces(entry, body)):
        return b"".join(pieces), True, None
    if reader is not None:
        # What fits in a frame without its places is not kept back by them.
        shown = show_parts(entry, reader, link.limits.max_body_bytes - len(body))
    elif holder is not None and entry.complete and can_be_mapped(entry, holder):
        shown = map_entry(entry, holder)
    if shown is None:
        return body, False, None
    pin, mapped, places = shown
    return body + places, False, (pin, mapped)


class Offering(msgspec.Struct, eq=False):
    """An offer that has left. Its parts follow once the peer grants them memory.

    If it has a ``pin``, they are the peer's to read already; or, if that is the
    ``reader`` of a stream, once it is told of each.
    """

    link: Link
    stream: LinkStream
    entry: StoredEntry
    transfer: int
    is_granted: bool = False
    pin: Pin | None = None
    reader: MapHolder | None = None
    hoist: Hoist | None = None
    _riding: RidingParts | None = None
    _hoisted: list[asyncio.Task[None]] = []
    _by_gpu: GpuSending | ShownSending | None = None

    def grant(
        self, transfer: int, by_gpu: GpuSending | ShownSending | None = None
    ) -> None:
        """The peer's memory is ready: send what has landed."""
        if self.pin is not None and self.reader is None:
            raise RemoteProtocolError("a Grant for what lies in mapped memory")
        if transfer == self.transfer and not self.is_granted:
            self.is_granted = True
            self._by_gpu = by_gpu
            for index in self.entry.landed:
                if self.is_granted:  # one that cannot be sent may end it all
                    self._send(index)

    def grant_devices(
        self, frame: GrantDevices, way: GpuLink, digest_part: DigestPart
    ) -> None:
        """As :meth:`grant`, of memory of the peer's GPU; what rides rides.

        :raises RemoteProtocolError: not all of it is on this side's GPU
        """
        if not _is_on_gpu(self.entry):
            raise RemoteProtocolError("a grant of a GPU's memory for what is on none")
        by_gpu = GpuSending(way, self.stream, frame, digest_part)
        self.grant(frame.transfer, by_gpu)

    def part_landed(self, index: int) -> None:
        """One more part can be sent."""
        if self.is_granted:
            self._send(index)

    def completed(self) -> None:
        """The entry is committed: nothing more comes."""
        self.stream.send(Complete(self.transfer))

    def retract(self) -> None:
        """The offer is void."""
        self.stream.send(Retract(self.transfer))

    def stop(self) -> None:
        """Send no more parts. What was pinned stays so until the peer lets it go."""
        if self.is_granted:
            self.is_granted = False
            self.link.payload.stop(self.transfer)
            if self._by_gpu is not None:
                self._by_gpu.stop()
            if self._riding is not None:
                self._riding.stop()
        for task in self._hoisted:
            task.cancel()

    def _send(self, index: int) -> None:
        part = self.entry.parts[index]
        region = part.region
        if region is None:
            return
        if self._by_gpu is not None and not rides(region.nbytes):
            self._by_gpu.send(index, region, part.spec, part.digest)
        elif region.is_on_device and self.hoist is not None:
            copied = partial(self._send_copy, index)
            self._hoisted.append(self.hoist(region, part.spec, copied))
        else:
            read = partial(_read, region)
            self._send_bytes(index, region.nbytes, read, region.memory)

    def _send_copy(self, index: int, copy: HostCopy) -> None:
        """A copy in host memory is there, or begins to be: let go when it was sent."""
        if isinstance(copy, Feed):
            feed, digest = self.link.payload.feed, self._digest_of(index)
            feed(self.transfer, index, copy, self._sent(index), digest=digest)
        else:
            self._send_bytes(index, copy.nbytes, lambda: copy, lambda: copy)

    def _send_bytes(
        self,
        index: int,
        nbytes: int,
        read: Callable[[], memoryview],
        memory: Callable[[], Memory],
    ) -> None:
        digest = self._digest_of(index)
        if rides(nbytes):
            if self._riding is None:
                self._riding = RidingParts(self.link, self.stream, self.transfer)
            self._riding.add(index, nbytes, read, digest)
        else:
            send, sent = self.link.payload.send, self._sent(index)
            send(self.transfer, index, memory(), sent, digest=digest)

    def _digest_of(self, index: int) -> bytes | None:
        return self.entry.parts[index].digest or None

    def _sent(self, index: int) -> Callable[[bytes, BaseException | None], None]:
        transfer, stream = self.transfer, self.stream

        def sent(digest: bytes, error: BaseException | None) -> None:
            if error is None:
                stream.send(Done(transfer, index, digest))

        return sent


def _is_on_gpu(entry: StoredEntry) -> bool:
    """Whether NCCL may send all that does not ride."""
    large = [part.region for part in entry.parts if not rides(part.spec.nbytes)]
    return bool(large) and all(one is not None and one.is_on_device for one in large)


def _pieces(entry: StoredEntry, preamble: bytes) -> list[bytes | memoryview] | None:
    """Return all that rides with the offer of a small entry, if all is at hand.

    Not even what is small has bytes at hand that lie on a GPU.
    """
    pieces: list[bytes | memoryview] = [preamble]
    for part in entry.parts:
        region = part.region
        if region is None or region.is_on_device:
            return None
        pieces.append(_read(region))
    return pieces


def _read(region: Region) -> memoryview:
    return region.view() if region.pages is None else joined(region.memory())
