"""What is offered to a peer of one entry, and how much of it the offer says already.

Its tensors may be places in a file that the peer has mapped, or in memory of a GPU that
the peer has open: where they will lie is said with the offer. All are the peer's to
read until it lets them go. Parts that did not leave with the offer follow its grant.
Plain functions; nothing here waits or knows how a delivery ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from asynckv.buffers.entries.entries import Lease, Shown, StoredEntry
from asynckv.errors import RemoteProtocolError
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import Complete, Offer, Retract
from asynckv.protocol.transfer_frames import Grant
from asynckv.protocol.values import MappedOffer, Place
from asynckv.sharing.exporter import Importer, Pin, place_of
from asynckv.transfers.manifest import INLINE_NBYTES, check_body, is_eager
from asynckv.transfers.outgoing import Outgoing, Routes
from asynckv.transfers.source import RegionSource, are_on_gpu
from asynckv.waits.own_tasks import OwnTasks

__all__ = (
    "Offering",
    "make_offer",
    "may_begin",
    "show",
)


_encoder: Final = msgspec.msgpack.Encoder()


def show(
    entry: StoredEntry,
    importer: Importer | None,
    max_nbytes: int,
    *,
    streams: bool = False,
) -> tuple[Pin, MappedOffer, bytes] | None:
    """Pin what the peer reads where it lies; return how an offer says so, and how its
    body ends.

    ``None`` if the peer reads nothing there, or to say so takes more than
    ``max_nbytes``.
    """
    if importer is None or not importer.is_usable:
        return None
    if (shown := _shown(entry, importer, streams=streams)) is None:
        return None
    end = b"".join((shown.places, *[region.view() for region in shown.beside]))
    if len(end) > max_nbytes:
        return None
    pin = importer.pin(shown.regions)
    return pin, MappedOffer(pin.number, len(shown.places), shown.edges), end


def _shown(entry: StoredEntry, importer: Importer, *, streams: bool) -> Shown | None:
    if entry.shown is not None and not streams:
        return entry.shown
    if (places := _places(entry, importer, streams=streams)) is None:
        return None
    regions = entry.regions[: len(places)]
    every = list(zip(regions, places, strict=True))
    there = [region for region, place in every if place is not None]
    encoded = _encoder.encode(places)
    if streams:
        return Shown(there, encoded)
    beside = [region for region, place in every if place is None]
    edges = importer.memory_file.edges(regions, places)
    entry.shown = Shown(there, encoded, edges, beside)
    return entry.shown


def _places(
    entry: StoredEntry, importer: Importer | None, *, streams: bool
) -> list[Place | None] | None:
    """Return where the peer will read each tensor, but for those that ride.

    They ride if they are little: with the offer of a whole entry what lies nowhere
    that it could read; of a stream, behind its grant, every eager part. ``None`` if
    it is to read nothing there.
    """
    if importer is None or not importer.is_usable or not entry.in_arena:
        return None
    if not importer.memory_file.shows_parts if streams else entry.is_small:
        return None
    regions = entry.regions[: len(entry.parts)]
    places = [
        None if streams and is_eager(region.nbytes) else place_of(region)
        for region in regions
    ]
    rides = [
        region.nbytes
        for region, place in zip(regions, places, strict=True)
        if place is None
    ]
    may_ride = all(map(is_eager, rides)) if streams else sum(rides) <= INLINE_NBYTES
    return places if may_ride and len(rides) < len(places) else None


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
    return not entry.is_small and _places(entry, importer, streams=False) is None


def make_offer(
    link: Link,
    stream: LinkStream,
    lease: Lease,
    importer: Importer | None = None,
    *,
    streams: bool = False,
) -> Offering:
    """Offer what was leased, with its bytes if they are small and all there.

    An ``importer`` who has the memory open is told where they lie; of a query that
    ``streams``, where parts will lie as they come.

    :raises EntryTooLarge: its tokens, roi and names do not fit in a frame
    """
    entry, max_nbytes = lease.entry, link.limits.max_body_bytes
    body, shown = entry.preamble(), None
    pieces = _pieces(entry) if entry.complete and entry.is_small else None
    if pieces is not None:
        body = b"".join((body, *pieces))
    check_body(max_nbytes, body)
    if pieces is None and (entry.complete or streams):
        shown = show(entry, importer, max_nbytes - len(body), streams=streams)
    pin, mapped, end = shown or (None, None, b"")
    on_gpu = pieces is None and are_on_gpu(
        [(part.spec.nbytes, part.region) for part in entry.parts]
    )
    offering = Offering(
        *(stream, entry, link.new_transfer()),
        is_on_gpu=on_gpu,
        pin=pin,
        importer=importer if streams and pin is not None else None,
    )
    offer = Offer(
        transfer=offering.transfer,
        inline=pieces is not None,
        entry_id=entry.entry_id,
        token=lease.token,
        attempt=lease.attempt,
        matched_tokens=lease.matched_tokens,
        on_gpu=on_gpu,
        complete=entry.complete,
        mapped=mapped,
    )
    stream.send(offer, body + end)
    return offering


class Offering(msgspec.Struct, eq=False):
    """An offer that has left. Its parts follow once the peer grants them memory.

    If it has a ``pin``, they are the peer's to read already; or, if there is an
    ``importer`` of a stream, once that is told of each.
    """

    stream: LinkStream
    entry: StoredEntry
    transfer: int
    is_on_gpu: bool = False
    pin: Pin | None = None
    importer: Importer | None = None
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
        if self.pin is not None and self.importer is None:
            raise RemoteProtocolError("a Grant for what lies in mapped memory")
        if self.outgoing is None:
            self.outgoing = Outgoing(
                *(self.stream, self.transfer, routes),
                failed=failed,
                is_on_gpu=self.is_on_gpu,
                exported=self.importer,
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


def _pieces(entry: StoredEntry) -> list[memoryview] | None:
    """Return the bytes of a small entry, if all are at hand to ride with its offer."""
    pieces: list[memoryview] = []
    for part in entry.parts:
        piece = None if part.region is None else part.region.read()
        if piece is None:
            return None
        pieces.append(piece)
    return pieces
