"""The serving side of one remote ``drop_select``, plain or streaming.

No task: a waiting query is an entry in the ledger and this object.
"""

from __future__ import annotations

import logging
from functools import partial

import msgspec

from asynckv.buffers.entries.entries import Lease, Waiter
from asynckv.buffers.entries.leases import entry_taken
from asynckv.buffers.serving.offer import (
    Offering,
    make_offer,
    may_begin,
)
from asynckv.buffers.serving.requests import LookupRequests
from asynckv.errors import (
    AsyncKVError,
    BufferClosed,
    EntryAborted,
    EntryTooLarge,
    LeaseLost,
    PeerLost,
    RemoteProtocolError,
)
from asynckv.links.link import LinkStream
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import (
    Accepted,
    Ack,
    Cancel,
    Cancelled,
    Frame,
    Nack,
    Noted,
    Reached,
    Select,
    Took,
)
from asynckv.protocol.transfer_frames import Grant
from asynckv.transfers.outgoing import ignore_grant
from asynckv.transfers.queries import TOKEN_NBYTES, Query

__all__ = ("ServedSelect", "query_of")

logger = logging.getLogger(__name__)

_BUSY_BYTES = 4 * 2**20
"""With so much unwritten for a peer, the next small delivery waits its turn."""


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
    _offering: Offering | None = None
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
            case Nack(token=token, reached=reached):
                if lease is not None and lease.token == token:
                    self.payer.leases.give_back(lease, reached=reached)
                self._finish(Cancelled())
            case _:
                raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")

    def on_lost(self, error: PeerLost) -> None:
        # A peer that says goodbye has said all: it has not handed the entry out.
        gave_up = error.goodbye and not self.payer.is_leaving
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
        self._finish(None)

    def _offer_if_due(self) -> None:
        lease, link = self._lease, self.payer.link
        if lease is None or self._offering is not None:
            return  # what was to be offered has ended, or was offered meanwhile
        entry = lease.entry
        importer, streams = self.payer.export.importer, self.streams
        if not entry.complete and not may_begin(entry, importer, streams=streams):
            return
        if link.outgoing_bytes > _BUSY_BYTES:
            link.call_when_drained(self._offer_if_due)
            return
        try:
            self._offering = make_offer(
                *(link, self._stream, lease, importer), streams=streams
            )
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
        if self.payer.is_leaving:
            self.payer.tell_idle()

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
        self._stream.close()
