"""The serving side of one remote ``drop_select``, plain or streaming.

No task: a waiting query is an entry in the ledger and this object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynckv.buffers.entries import Lease, StoredEntry, Waiter
from asynckv.buffers.manifest import INLINE_NBYTES, check_body, pack
from asynckv.buffers.queries import TOKEN_NBYTES, Query
from asynckv.errors import (
    BufferClosed,
    EntryAborted,
    EntryTooLarge,
    LeaseLost,
    PeerLost,
    RemoteProtocolError,
)
from asynckv.links.requests import LinkStream
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import (
    Accepted,
    Ack,
    Cancel,
    Cancelled,
    Complete,
    Done,
    Frame,
    Grant,
    Nack,
    Noted,
    Offer,
    Reached,
    Retract,
    Select,
    Took,
)

if TYPE_CHECKING:
    from asynckv.buffers.serve_lookup import LookupService

__all__ = ("ServedSelect", "query_of")

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


class ServedSelect:
    """A remote consumer: what the ledger leases to, and what its link talks to."""

    def __init__(
        self, service: LookupService, stream: LinkStream, frame: Select
    ) -> None:
        self.consumer = service.link.peer.id
        self.streams = frame.stream
        self._service = service
        self._leases = service.buffer.ledger.leases
        self._stream = stream
        self._waiter: Waiter | None = None
        self._lease: Lease | None = None
        self._transfer = 0
        self._is_granted = False
        self._is_offered = False
        self._is_settling = False
        self._is_acknowledged = False
        self._is_over = False

    def wait_no_longer(self) -> None:
        """The server leaves: nothing new is begun. What is under way ends."""
        if self._lease is None and self._waiter is not None:
            self._leases.forget(self._waiter)

    def select(self, query: Query) -> None:
        """Ask the ledger; an offer may go out at once."""
        self._waiter = self._leases.select(query, self, self._service.link.fingerprint)
        if self._is_over:  # the offer failed at once
            self._leases.forget(self._waiter)

    def may_charge(self, nbytes: int) -> bool:
        return self._service.may_charge(nbytes)

    def charge(self, nbytes: int) -> None:
        self._service.charge(nbytes)

    def leased(self, lease: Lease) -> None:
        self._lease = lease
        self._is_granted = self._is_offered = False
        self._service.deliveries.add(self)
        if lease.entry.complete or self._may_begin(lease.entry):
            self._offer_when_writable()

    def part_landed(self, lease: Lease, index: int) -> None:
        if self._is_granted:
            self._send_part(lease.entry, index)

    def completed(self, lease: Lease) -> None:
        if not self._is_offered:
            self._offer_when_writable()
        else:
            self._stream.send(Complete(self._transfer))

    def retracted(self, lease: Lease) -> None:
        self._end_delivery()
        if self._is_offered:
            self._stream.send(Retract(self._transfer))
        self._is_offered = False

    def aborted(self, lease: Lease, reason: str) -> None:
        if reason == "lapsed":
            self._finish(to_failure(LeaseLost("the entry was held for too long")))
        else:
            self._finish(to_failure(EntryAborted(reason=reason)))

    def closed(self) -> None:
        self._finish(to_failure(BufferClosed("the buffer was closed by its owner")))

    def on_frame(self, frame: Frame, body: bytes) -> None:
        lease = self._lease
        if self._is_acknowledged:
            return  # what crosses the answer comes too late
        match frame:
            case Took(token=token):
                self._on_took(token)
            case Ack(token=token, confirm=confirm):
                self._on_ack(token, confirm)
            case Cancel():
                self._forget()
                self._finish(Cancelled())
            case Grant(transfer=transfer):
                self._on_grant(transfer)
            case Reached(token=token):
                if self._is_settling:
                    self._acknowledge()
                elif lease is not None and lease.token == token:
                    self._leases.reach(lease)
            case Nack(token=token, reached=reached):
                if lease is not None and lease.token == token:
                    self._leases.give_back(lease, reached=reached)
                self._forget()
                self._finish(Cancelled())
            case _:
                raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")

    def on_lost(self, error: PeerLost) -> None:
        if self._is_settling or self._is_acknowledged:
            self._acknowledge()
        self._forget()
        self._close()

    def _on_ack(self, token: bytes, confirm: bool) -> None:
        lease = self._lease
        if lease is None or lease.token != token or not lease.is_valid:
            lost = LeaseLost("the entry was taken back before it was acknowledged")
            self._forget()  # the next one may be in its hand already
            self._finish(to_failure(lost))
        elif confirm:
            self._is_settling = True
            self._stream.send(Noted())
        else:
            self._is_acknowledged = True
            self._acknowledge()

    def _on_grant(self, transfer: int) -> None:
        lease = self._lease
        if lease is not None and self._is_current(transfer):
            self._is_granted = True
            for index in lease.entry.landed:
                self._send_part(lease.entry, index)

    def _on_took(self, token: bytes) -> None:
        lease = self._lease
        if lease is not None and lease.token == token:
            # What came in the same packet is answered first: often the next query.
            self._is_acknowledged = True
            self._service.loop.call_soon(self._acknowledge)
        else:
            self._forget()
            self._close()

    def _acknowledge(self) -> None:
        lease, self._is_settling = self._lease, False
        if lease is None:
            return
        try:
            self._leases.acknowledge(lease)
        except LeaseLost as exc:
            self._forget()
            self._finish(to_failure(exc))
            return
        self._end_delivery()
        self._stream.send(Accepted())
        self._close()

    def _forget(self) -> None:
        lease = self._lease
        self._end_delivery()
        if lease is not None:
            self._leases.give_back(lease, reached=lease.reached)
        if self._waiter is not None:
            self._leases.forget(self._waiter)

    def _end_delivery(self) -> None:
        if self._is_granted:
            self._service.link.payload.stop(self._transfer)
        self._is_granted = False
        self._lease = None
        self._service.delivery_ended(self)

    def _finish(self, last: Frame) -> None:
        self._end_delivery()
        if not self._is_over:
            self._stream.send(last)
        self._close()

    def _close(self) -> None:
        self._is_over = True
        self._waiter = None  # which refers to this object
        self._service.selects.discard(self)
        self._stream.close()

    def _is_current(self, transfer: int) -> bool:
        return (
            self._is_offered and not self._is_granted and (transfer == self._transfer)
        )

    def _may_begin(self, entry: StoredEntry) -> bool:
        """May an offer go out before the entry is whole?

        A stream shows what it gets: it must not see a plain insert that can still
        be withdrawn. What is small rides with its offer, once it is whole.
        """
        return entry.draft.streaming if self.streams else not self._is_small(entry)

    def _is_small(self, entry: StoredEntry) -> bool:
        return entry.tensor_nbytes <= INLINE_NBYTES

    def _offer_when_writable(self) -> None:
        lease = self._lease
        if lease is None or self._is_over or not lease.is_valid:
            return
        link = self._service.link
        if link.outgoing_bytes > _BUSY_BYTES:
            link.call_when_drained(self._offer_when_writable)
        elif not self._is_offered:
            self._offer(lease)

    def _offer(self, lease: Lease) -> None:
        entry = lease.entry
        inline = entry.complete and self._is_small(entry)
        self._transfer = self._service.link.new_transfer()
        self._is_offered = True
        views = [p.region.view() for p in entry.parts if inline and p.region]
        body = pack(entry.records(), entry.input_tokens, entry.roi, views)
        try:
            check_body(self._service.link.limits.max_body_bytes, body)
        except EntryTooLarge as exc:
            # The ledger is in the middle of leasing: told on the next tick.
            self._service.loop.call_soon(self._refuse, exc)
            return
        offer = Offer(
            transfer=self._transfer,
            inline=inline,
            entry_id=entry.entry_id,
            token=lease.token,
            attempt=lease.attempt,
            matched_tokens=lease.matched_tokens,
            complete=entry.complete,
        )
        self._stream.send(offer, body)

    def _refuse(self, error: EntryTooLarge) -> None:
        if not self._is_over:
            self._forget()
            self._finish(to_failure(error))

    def _send_part(self, entry: StoredEntry, index: int) -> None:
        part, transfer, stream = entry.parts[index], self._transfer, self._stream
        if part.region is None:
            return

        def sent(digest: bytes, error: BaseException | None) -> None:
            if error is None:
                stream.send(Done(transfer, index, digest))

        self._service.link.payload.send(
            transfer, index, part.region.view(), sent, digest=part.digest or None
        )
