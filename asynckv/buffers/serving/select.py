"""The serving side of one remote ``drop_select``, plain or streaming, and its offer.

No task: a waiting query is an entry in the ledger and :class:`ServedSelect`. What it is
offered of one entry may be places in a file that the peer has mapped, or in memory of a
GPU that the peer has open: where they will lie is said with the offer. All are the
peer's to read until it lets them go. Parts that did not leave with the offer follow its
grant.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from asynckv.buffers.entries.entries import Exported, Lease, StoredEntry, Waiter
from asynckv.buffers.entries.leases import entry_taken
from asynckv.buffers.serving.requests import LookupRequests
from asynckv.buffers.serving.service import BUSY_BYTES
from asynckv.errors import (
    AsyncKVError,
    BufferClosed,
    EntryAborted,
    EntryTooLarge,
    LeaseLost,
    PeerLost,
    RemoteProtocolError,
)
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import (
    Accepted,
    Ack,
    Cancel,
    Cancelled,
    Complete,
    Frame,
    Nack,
    Noted,
    Offer,
    Reached,
    Retract,
    Select,
    Took,
)
from asynckv.protocol.transfer import EAGER_NBYTES
from asynckv.protocol.transfer_frames import Grant
from asynckv.protocol.values import MappedOffer, Place
from asynckv.sharing.exporter import Importer, Pin, place_of
from asynckv.transfers.manifest import INLINE_NBYTES, check_body
from asynckv.transfers.outgoing import Outgoing, Routes, ignore_grant
from asynckv.transfers.source import RegionSource, are_on_gpu
from asynckv.transfers.tokens import TOKEN_NBYTES, Query
from asynckv.waits.waiting import OwnTasks

__all__ = (
    "SentOffer",
    "ServedSelect",
    "export_entry",
    "make_offer",
    "may_begin",
    "query_of",
)

logger = logging.getLogger(__name__)

_encoder: Final = msgspec.msgpack.Encoder()


def export_entry(
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
    if (exported := _exported(entry, importer, streams=streams)) is None:
        return None
    end = b"".join((exported.places, *[region.view() for region in exported.beside]))
    if len(end) > max_nbytes:
        return None
    pin = importer.pin(exported.regions)
    return pin, MappedOffer(pin.number, len(exported.places), exported.edges), end


def _exported(
    entry: StoredEntry, importer: Importer, *, streams: bool
) -> Exported | None:
    if entry.exported is not None and not streams:
        return entry.exported
    if (places := _places(entry, importer, streams=streams)) is None:
        return None
    every = list(zip(entry.regions, places, strict=True))
    there = [region for region, place in every if place is not None]
    encoded = _encoder.encode(places)
    if streams:
        return Exported(there, encoded)
    beside = [region for region, place in every if place is None]
    edges = importer.memory_file.edges(entry.regions, places)
    entry.exported = Exported(there, encoded, edges, beside)
    return entry.exported


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
    if not importer.memory_file.exports_parts if streams else entry.is_small:
        return None
    regions = entry.regions
    places = [
        None if streams and region.nbytes <= EAGER_NBYTES else place_of(region)
        for region in regions
    ]
    rides = [
        region.nbytes
        for region, place in zip(regions, places, strict=True)
        if place is None
    ]
    may_ride = (
        all(nbytes <= EAGER_NBYTES for nbytes in rides)
        if streams
        else sum(rides) <= INLINE_NBYTES
    )
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
) -> SentOffer:
    """Offer what was leased, with its bytes if they are small and all there.

    An ``importer`` who has the memory open is told where they lie; of a query that
    ``streams``, where parts will lie as they come.

    :raises EntryTooLarge: its tokens, roi and names do not fit in a frame
    """
    entry, max_nbytes = lease.entry, link.limits.max_body_bytes
    body, exported = entry.preamble(), None
    pieces = _pieces(entry) if entry.complete and entry.is_small else None
    if pieces is not None:
        body = b"".join((body, *pieces))
    check_body(max_nbytes, body)
    if pieces is None and (entry.complete or streams):
        exported = export_entry(
            entry, importer, max_nbytes - len(body), streams=streams
        )
    pin, mapped, end = exported or (None, None, b"")
    on_gpu = pieces is None and are_on_gpu(entry.sizes, entry.regions)
    offering = SentOffer(
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


class SentOffer(msgspec.Struct, eq=False):
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

        Also what it was to read where it lies, if it cannot. A grant of an offer
        before this one has crossed the end of that.

        :raises RemoteProtocolError: it has no memory that anything leads to
        """
        if frame.transfer != self.transfer:
            ignore_grant(frame, self.stream.link)
            return
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


def query_of(frame: Select, body: bytes) -> Query:
    """Read what a peer asks for.

    :raises RemoteProtocolError: the key is not whole tokens
    """
    if len(body) % TOKEN_NBYTES or frame.has_key == (not body):
        raise RemoteProtocolError(f"a key of {len(body)} bytes is no list of tokens")
    key = bytes(body) if frame.has_key else None
    return Query(key, frame.entry_id, frame.match, frame.min_matched_tokens)


class ServedSelect(msgspec.Struct, eq=False):
    """A remote consumer: what entries are leased to, and what its link talks to.

    ``payer`` is the service of its peer, and charged for what the query keeps.
    """

    payer: LookupRequests
    consumer: str
    streams: bool
    _stream: LinkStream
    _kept_bytes: int
    _waiter: Waiter | None = None
    _lease: Lease | None = None
    _offering: SentOffer | None = None
    _settling: Lease | None = None

    def select(self, query: Query) -> None:
        """Ask for an entry; an offer may go out at once."""
        service = self.payer
        self._waiter = service.leases.select(query, self, service.link.fingerprint)

    def wait_no_longer(self) -> None:
        """The server leaves: nothing new is begun. What is under way ends."""
        if self._lease is None and self._waiter is not None:
            self.payer.leases.forget(self._waiter)

    def leased(self, lease: Lease) -> None:
        self._lease = lease
        self.payer.deliveries.add(self)
        self._offer_if_due()

    def part_landed(self, lease: Lease, index: int) -> None:
        if self._offering is not None:
            self._offering.part_landed(index)

    def completed(self, lease: Lease) -> None:
        if self._offering is not None:
            self._offering.completed()
        else:
            self._offer_if_due()

    def retracted(self, lease: Lease) -> None:
        offering = self._offering
        self._end_delivery()
        if offering is not None:
            offering.retract()

    def aborted(self, lease: Lease, reason: str) -> None:
        if reason == "lapsed":
            self._fail(LeaseLost("the entry was held for too long"))
        else:
            self._fail(EntryAborted(reason=reason))

    def taken(self) -> None:
        self._fail(entry_taken())

    def closed(self) -> None:
        self._fail(BufferClosed("the buffer was closed by its owner"))

    def on_frame(self, frame: Frame, body: bytes) -> None:
        lease = self._lease
        match frame:
            case Took(token=token):
                # What came in the same packet is answered first: often the next
                # query.
                self.payer.link.call_when_answered(partial(self._take, lease, token))
            case Ack(token=token, confirm=confirm):
                self._on_ack(token, confirm)
            case Cancel():
                self._finish(Cancelled())
            case Grant():
                if self._offering is None:
                    ignore_grant(frame, self.payer.link)
                else:
                    payer, failed = self.payer, self._cannot_be_sent
                    self._offering.on_grant(frame, payer, failed, payer.tasks)
            case Reached(token=token):
                if self._settling is not None:
                    self._acknowledge(self._settling)
                elif lease is not None and lease.token == token:
                    self.payer.leases.reach(lease)
                else:  # it has crossed the end of that; what came after nobody wants
                    self._fail(LeaseLost("the entry was taken back when it came"))
            case Nack(token=token, reached=reached):
                if lease is not None and lease.token == token:
                    self.payer.leases.give_back(lease, reached=reached)
                self._finish(Cancelled())
            case _:
                raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")

    def on_lost(self, error: PeerLost) -> None:
        # A peer that says goodbye has said all: it has not handed the entry out.
        gave_up = error.goodbye and not self.payer.is_draining
        if self._settling is not None and not gave_up:
            self._acknowledge(self._settling)
        else:
            self._finish(None)

    def _on_ack(self, token: bytes, confirm: bool) -> None:
        lease = self._lease
        if lease is None or lease.token != token or not lease.is_valid:
            self._fail(LeaseLost("the entry was taken back before it was acknowledged"))
        elif confirm:
            self._settling = lease
            self.payer.leases.keep_for_ack(lease, self._acknowledge)
            self._stream.send(Noted())
        else:
            self._acknowledge(lease)

    def _acknowledge(self, lease: Lease) -> None:
        try:
            self.payer.leases.acknowledge(lease)
        except LeaseLost as exc:
            self._fail(exc)
        else:
            self._finish(Accepted())

    def _take(self, lease: Lease | None, token: bytes) -> None:
        """The peer has it already, and hears nothing more."""
        if lease is not None and lease.token == token and lease.is_valid:
            self.payer.leases.acknowledge(lease)
        pins = self.payer.pins.pop(self._stream.id, ())
        self._finish(None)
        for importer, number in pins:  # it may not have heard of them
            importer.unpin(number)

    def _offer_if_due(self) -> None:
        lease, link = self._lease, self.payer.link
        if lease is None or self._offering is not None:
            return  # what was to be offered has ended, or was offered meanwhile
        entry = lease.entry
        importer, streams = self.payer.export.importer, self.streams
        if not entry.complete and not may_begin(entry, importer, streams=streams):
            return
        if link.outgoing_bytes > BUSY_BYTES:
            link.call_when_drained(self._offer_if_due)
            return
        try:
            self._offering = offering = make_offer(
                *(link, self._stream, lease, importer), streams=streams
            )
            if importer is not None and offering.pin is not None:
                pins = self.payer.pins.setdefault(self._stream.id, [])
                pins.append((importer, offering.pin.number))
        except EntryTooLarge as exc:
            # The lease is being made just now: told on the next tick.
            self.payer.loop.call_soon(self._fail, exc)

    def _cannot_be_sent(self, error: Exception) -> None:
        is_known = isinstance(error, AsyncKVError)
        logger.warning(
            "an entry cannot be sent to %s: %s",
            *(self.consumer, error),
            exc_info=None if is_known else error,
        )
        self._fail(error)

    def _end_delivery(self) -> None:
        if self._offering is not None:
            self._offering.stop()
        self._offering = self._lease = None
        self.payer.deliveries.discard(self)
        if self.payer.is_draining:
            self.payer.notify_idle()

    def _fail(self, error: Exception) -> None:
        self._finish(to_failure(error))

    def _finish(self, last: Frame | None) -> None:
        """End the query. What is in its hand goes back."""
        lease, waiter = self._lease, self._waiter
        self._end_delivery()
        if lease is not None and lease.is_valid:
            self.payer.leases.give_back(lease, reached=lease.reached)
        if waiter is not None:
            self.payer.leases.forget(waiter)
            self._waiter = None  # which refers to this object
        if last is not None:
            self._stream.send(last)
        self.payer.kept.queries.give(self._kept_bytes)
        self._kept_bytes = 0  # it may end twice
        self.payer.selects.discard(self)
        self.payer.pins.pop(self._stream.id, None)
        self._stream.close()
