"""What is offered to a peer of one entry, and how much of it the offer says already.

Its tensors may be places in a file that the peer has mapped, or in memory of a GPU that
the peer has open: where they will lie is said with the offer. All are the peer's to
read until it lets them go. Parts that did not leave with the offer follow its grant.
Plain functions; nothing here waits or knows how a delivery ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from asynckv.buffers.entries.entries import Lease, Shown, StoredEntry
from asynckv.errors import RemoteProtocolError
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import Complete, Offer, Retract
from asynckv.protocol.transfer_frames import Grant
from asynckv.protocol.values import MappedOffer, Place
from asynckv.sharing.exporter import Importer, Pin, place_of
from asynckv.tensors.arena import Region
from asynckv.tensors.device_regions import DeviceRegion
from asynckv.tensors.runs import joined
from asynckv.tensors.slab_regions import SlabRegion
from asynckv.transfers.manifest import INLINE_NBYTES, check_body, is_eager
from asynckv.transfers.outgoing import Exported, Outgoing, Routes
from asynckv.transfers.source import RegionSource, are_on_gpu
from asynckv.waits.own_tasks import OwnTasks

__all__ = (
    "Offering",
    "can_be_mapped",
    "make_offer",
    "map_entry",
    "may_begin",
    "reads_gpu",
    "show_parts",
)


_encoder: Final = msgspec.msgpack.Encoder()


def can_be_mapped(entry: StoredEntry, importer: Importer | None) -> bool:
    """Will the peer read the entry where it lies, once it is whole?

    What is on the heap rides along, if it is little.
    """
    if (
        importer is None
        or not importer.is_usable
        or entry.is_small
        or not entry.in_arena
    ):
        return False
    regions = entry.regions[: len(entry.parts)]
    others = [r.nbytes for r in regions if not isinstance(r, SlabRegion)]
    return len(others) < len(regions) and sum(others) <= INLINE_NBYTES


def map_entry(entry: StoredEntry, importer: Importer) -> tuple[Pin, MappedOffer, bytes]:
    """Pin a whole entry; return how an offer says so, and how its body ends."""
    regions = entry.regions[: len(entry.parts)]
    shown = entry.shown = entry.shown or _show(regions, importer)
    pin = importer.pin(shown.regions)
    mapped = MappedOffer(pin.number, len(shown.places), shown.edges)
    return pin, mapped, b"".join((shown.places, *_heap_bytes(regions)))


def _show(regions: Sequence[Region], importer: Importer) -> Shown:
    places = [place_of(region) for region in regions]
    shared = [region for region in regions if isinstance(region, SlabRegion)]
    edges = importer.memory_file.edges(regions, places)
    return Shown(shared, _encoder.encode(places), edges)


def _heap_bytes(regions: Sequence[Region]) -> list[memoryview]:
    return [r.view() for r in regions if not isinstance(r, SlabRegion)]


def reads_gpu(importer: Importer | None) -> bool:
    """Has the peer memory of a GPU open, rather than some of the host's?"""
    return importer is not None and importer.memory_file.must_be_closed_there


def show_parts(
    entry: StoredEntry, importer: Importer | None, max_nbytes: int
) -> tuple[Pin, MappedOffer, bytes] | None:
    """Pin what does not ride; return how an offer says so, and how its body ends.

    ``None`` if the peer cannot read all of that where it lies, or there is nothing, or
    to say so takes more than ``max_nbytes``.
    """
    if importer is None or not reads_gpu(importer) or not importer.is_usable:
        return None
    if not entry.in_arena:
        return None
    places, shown = list[Place | None](), list[DeviceRegion]()
    for region in entry.regions[: len(entry.parts)]:
        if is_eager(region.nbytes):
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
    pin = importer.pin(shown)
    return pin, MappedOffer(pin.number, len(encoded)), encoded


def may_begin(
    entry: StoredEntry, importer: Importer | None = None, *, streams: bool
) -> bool:
    """May an offer go out before the entry is whole?

    A stream shows what it gets: it must not see a plain insert that can still
    be withdrawn. What is small rides with its offer, once it is whole; what will be
    read where it lies is read then.
    """
    if streams:
        return entry.draft.streaming
    return not entry.is_small and not can_be_mapped(entry, importer)


def make_offer(
    link: Link,
    stream: LinkStream,
    lease: Lease,
    importer: Importer | None = None,
    *,
    reader: Exported | None = None,
) -> Offering:
    """Offer what was leased, with its bytes if they are small and all there.

    An ``importer`` who has the memory open is told where they lie; the ``reader`` of a
    stream, where parts will lie as they come.

    :raises EntryTooLarge: its tokens, roi and names do not fit in a frame
    """
    entry = lease.entry
    by_parts = None if reader is None else reader.importer
    body, inline, shown = _body_of(link, entry, importer, by_parts)
    pin, mapped = (None, None) if shown is None else shown
    try:
        check_body(link.limits.max_body_bytes, body)
    except BaseException:
        keeper = importer if reader is None else by_parts
        if keeper is not None and pin is not None:
            keeper.unpin(pin.number)
        raise
    offering = Offering(
        *(stream, entry, link.new_transfer()),
        is_on_gpu=not inline
        and are_on_gpu([(part.spec.nbytes, part.region) for part in entry.parts]),
        pin=pin,
        exported=reader if pin is not None else None,
    )
    offer = Offer(
        transfer=offering.transfer,
        inline=inline,
        entry_id=entry.entry_id,
        token=lease.token,
        attempt=lease.attempt,
        matched_tokens=lease.matched_tokens,
        on_gpu=offering.is_on_gpu,
        complete=entry.complete,
        mapped=mapped,
    )
    stream.send(offer, body)
    return offering


def _body_of(
    link: Link,
    entry: StoredEntry,
    importer: Importer | None,
    reader: Importer | None,
) -> tuple[bytes, bool, tuple[Pin, MappedOffer] | None]:
    """Return what an offer says, whether the bytes are in it, and what was pinned."""
    body, shown = entry.preamble(), None
    if entry.complete and entry.is_small and (pieces := _pieces(entry, body)):
        return b"".join(pieces), True, None
    if reader is not None:
        # What fits in a frame without its places is not kept back by them.
        shown = show_parts(entry, reader, link.limits.max_body_bytes - len(body))
    elif importer is not None and entry.complete and can_be_mapped(entry, importer):
        shown = map_entry(entry, importer)
    if shown is None:
        return body, False, None
    pin, mapped, places = shown
    return body + places, False, (pin, mapped)


class Offering(msgspec.Struct, eq=False):
    """An offer that has left. Its parts follow once the peer grants them memory.

    If it has a ``pin``, they are the peer's to read already; or, if ``exported`` says
    who reads a stream's, once it is told of each.
    """

    stream: LinkStream
    entry: StoredEntry
    transfer: int
    is_on_gpu: bool = False
    pin: Pin | None = None
    exported: Exported | None = None
    outgoing: Outgoing | None = None

    def on_grant(
        self,
        frame: Grant,
        routes: Routes,
        failed: Callable[[Exception], None],
        tasks: OwnTasks,
    ) -> None:
        """The peer's memory is ready: send what has landed.

        :raises RemoteProtocolError: it reads all of it where it lies, or has none that
            anything leads to
        """
        if self.pin is not None and self.exported is None:
            raise RemoteProtocolError("a Grant for what lies in mapped memory")
        if self.outgoing is None:
            self.outgoing = Outgoing(
                *(self.stream, self.transfer, routes),
                failed=failed,
                is_on_gpu=self.is_on_gpu,
                exported=self.exported,
                within=tasks,
            )
            for index in self.entry.landed:
                self.part_landed(index)
        self.outgoing.on_grant(frame)

    def part_landed(self, index: int) -> None:
        """One more part can be sent."""
        part = self.entry.parts[index]
        if self.outgoing is not None and part.region is not None:
            source = RegionSource(part.region, part.spec, part.digest or b"")
            self.outgoing.add(index, source)

    def completed(self) -> None:
        """The entry is committed: nothing more comes."""
        self.stream.send(Complete(self.transfer))

    def retract(self) -> None:
        """The offer is void."""
        self.stream.send(Retract(self.transfer))

    def stop(self) -> None:
        """Send no more parts. What was pinned stays so until the peer lets it go."""
        if self.outgoing is not None:
            self.outgoing.stop()


def _pieces(entry: StoredEntry, preamble: bytes) -> list[bytes | memoryview] | None:
    """Return all that rides with the offer of a small entry, if all is at hand.

    Not even what is small has bytes at hand that lie on a GPU.
    """
    pieces: list[bytes | memoryview] = [preamble]
    for part in entry.parts:
        region = part.region
        if region is None or region.is_on_device:
            return None
        pieces.append(joined(region.memory()))
    return pieces
