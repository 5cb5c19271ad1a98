"""The asking side of one remote ``drop_select`` on one link, plain or streaming.

Frames change this object's state; the coroutine that selects waits for a change
and does what is to be done. Memory that the caller lent (``into``) is quiet
before any error reaches the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from asynckv.buffers.answers import fail_by
from asynckv.buffers.asking import ANSWER_S
from asynckv.buffers.delivery import Delivery
from asynckv.buffers.gpu_places import may_land_on_gpu, places_on_gpu
from asynckv.buffers.lifting import on_host
from asynckv.buffers.manifest import unpack
from asynckv.buffers.map_reader import MapReader
from asynckv.buffers.queries import TOKEN_NBYTES, Query
from asynckv.buffers.receive_budget import ReceiveBudget
from asynckv.buffers.watchers import Watchers
from asynckv.errors import LeaseLost, PeerLost, RemoteProtocolError
from asynckv.links.gpu_arrivals import GpuArrivals, Ways
from asynckv.links.link import Link
from asynckv.links.receiving import Reception
from asynckv.protocol.device_frames import GrantDevices, SentDevices
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
from asynckv.protocol.payload_frames import Done, Grant, Riders
from asynckv.protocol.values import MappedOffer
from asynckv.tensors.blocks import KVMemory

__all__ = ("Selecting", "check_key_fits")


class Selecting:
    """One query on one link. ``delivery`` is the offer that stands, if one does."""

    delivery: Delivery | None = None
    may_have_counted = False
    _landed: list[str]
    _names: list[str]
    _error: Exception | None = None
    _is_acknowledged = False
    _is_noted = False
    _is_answered = False
    _is_accepted = False
    _ways: Ways | None = None
    _arrivals: GpuArrivals | None = None

    def __init__(
        self,
        link: Link,
        query: Query,
        targets: Mapping[str, KVMemory],
        budget: ReceiveBudget,
        *,
        streams: bool = False,
        reader: MapReader | None = None,
        ways: Ways | None = None,
    ) -> None:
        self._reader = reader
        if ways is not None:
            self._ways = ways
        self.query = query
        self._link = link
        self._targets = targets
        self._budget = budget
        self._streams = streams
        self._lent: tuple[Reception, ...] = ()
        self._watchers = Watchers()
        key = query.key or b""
        check_key_fits(key, link.limits.max_body_bytes)
        frame = Select(
            query.key is not None,
            query.entry_id,
            query.match,
            query.min_matched_tokens,
            streams,
        )
        self._stream = link.open_stream(self, frame, key)

    @property
    def incarnation(self) -> str:
        """Whom it asks: changes when the peer has lost its memory."""
        return self._link.peer.incarnation

    async def delivered(self) -> Delivery:
        """Wait for an entry; unless the query streams, for all of it, verified.

        An offer that is retracted meanwhile is forgotten; the wait goes on.

        :raises Exception: what ended the query; ``PeerLost`` if the link did
        """
        while True:
            while (delivery := self.delivery) is None:
                await self.changed()
            if delivery.offer.inline:
                delivery.read_inline(self._host_targets)
            elif delivery.mapped is not None and self._reader is not None:
                await self._reader.take(
                    delivery, self._targets, self._budget, self._stands
                )
            else:
                await self._accept_somewhere(delivery)
            if self._error is not None:
                raise self._error
            while self.delivery is delivery:
                if self._streams or delivery.is_whole:
                    return delivery
                await self.changed()

    def changed(self) -> asyncio.Future[None]:
        """Return what is done when a frame has changed something.

        :raises Exception: nothing will change any more; what ended the query
        """
        if self._error is not None:
            raise self._error
        return self._watchers.next_change()

    def reach(self, delivery: Delivery) -> None:
        """The application has it from now on. Never waits."""
        self._stream.send(Reached(delivery.offer.token))

    def settle_at_once(self, delivery: Delivery) -> None:
        """Acknowledge verified receipt of a small entry. Never waits."""
        self._stream.send(Took(delivery.offer.token))
        self._stream.close()
        if delivery.charged_bytes:
            self.release()

    async def settle(self, delivery: Delivery) -> None:
        """Acknowledge verified receipt: at most once, never both used and given back.

        The answer is waited for; a cancellation meanwhile gives the entry back,
        if the peer learns of it. If the link is cut first, all the peer has heard
        is the Ack, be it that the application has the entry by now (the Reached
        was under way) or that the call was cancelled (the Cancel was). It has to
        choose, and counts the delivery: an entry is rather lost to a cancelled
        call than used twice. No order of frames avoids that: one of them is the
        last, and who sends it cannot know whether it arrives. The peer could
        only keep the entry until it hears of this side again, which may be never.
        A goodbye comes behind all other frames, so it leaves no doubt.
        """
        token = delivery.offer.token
        self._is_acknowledged = True
        self._stream.send(Ack(token, confirm=True))
        async with asyncio.timeout(ANSWER_S):
            while not self._is_noted:
                await self.changed()
        self._stream.send(Reached(token))
        if self._reader is None:  # else one more offer may be under way: see there
            self._stream.close()

    async def acknowledge(self, delivery: Delivery) -> None:
        """Acknowledge use, and wait for the answer.

        What has not come by now is not wanted, nor is it missed if it came wrong.

        :raises LeaseLost: the entry was taken back meanwhile
        """
        self._is_acknowledged = True
        if delivery.reception is not None:
            delivery.reception.stop()
        if not self._is_answered:
            self._error = None  # of a part that nobody was given
            self.may_have_counted = True
            self._stream.send(Ack(delivery.offer.token))
        async with asyncio.timeout(ANSWER_S):
            while not self._is_accepted:
                await self.changed()

    def give_back(self, delivery: Delivery, *, reached: bool) -> None:
        """Give the delivery back. Never waits."""
        if not self._is_answered:
            self._stream.send(Nack(delivery.offer.token, reached=reached))
        self.close()

    def cancel(self) -> None:
        """Wait no longer, and give back what was offered. Never waits."""
        if not self._is_answered:
            self._stream.send(Cancel())
        self.close()

    def close(self) -> None:
        """Nothing more is waited for, or read. Never waits."""
        self._error = self._error or RuntimeError("this drop_select is over")
        if self.delivery is not None:
            self.delivery.let_go()
            if self.delivery.reception is not None:
                self.delivery.reception.stop()
        self.release()

    async def quiesce(self) -> None:
        """Wait until nothing touches memory that the caller lent (at most 1 s)."""
        while self._lent:
            await self._lent[-1].quiesce()
            self._lent = self._lent[:-1]

    def release(self) -> None:
        """The tensors are the application's now: no longer charged."""
        if self.delivery is not None:
            self.delivery.uncharge(self._budget)

    def on_frame(self, frame: Frame, body: bytes) -> None:
        delivery = self.delivery
        match frame:
            case Offer():
                self._on_offer(frame, body)
            case Done() | Riders() | SentDevices():
                self._on_parts(frame, body)
            case Complete(transfer=transfer):
                if delivery is not None and delivery.offer.transfer == transfer:
                    delivery.is_complete = True
                    if delivery.reception is not None:
                        delivery.reception.expect()
            case Retract(transfer=transfer):
                if delivery is not None and delivery.offer.transfer == transfer:
                    self._on_retract(delivery)
            case Noted():
                self._is_noted = True
            case Accepted() if self._is_acknowledged:
                self._is_answered = self._is_accepted = True
            case Cancelled() if delivery is not None:
                self._fail(self._error or LeaseLost("the peer gave the delivery up"))
            case _:
                fail_by(frame, "drop_select", self._fail)
        self._watchers.wake()

    def on_lost(self, error: PeerLost) -> None:
        self._fail(self._error or error)

    def part_verified(self, index: int, digest: bytes) -> None:
        self._landed.append(self._names[index])
        self._watchers.wake()

    def reception_failed(self, error: Exception) -> None:
        self._error = error
        self._watchers.wake()

    def _fail(self, error: Exception) -> None:
        self._is_answered = True
        self._error = error
        self._watchers.wake()

    def _on_offer(self, offer: Offer, body: bytes) -> None:
        if self.delivery is not None:
            raise RemoteProtocolError("a second offer, the first one stands")
        if offer.mapped is not None:
            self._on_mapped(offer, offer.mapped, body)
            return
        manifest = unpack(body, inline=offer.inline)
        if not offer.inline:
            self._link.payload.announce(offer.transfer)
        self.delivery = Delivery(offer, manifest)

    def _stands(self, delivery: Delivery) -> bool:
        return self.delivery is delivery and self._error is None

    def _on_mapped(self, offer: Offer, mapped: MappedOffer, body: bytes) -> None:
        reader = self._reader
        if reader is None or offer.inline or not offer.complete:
            raise RemoteProtocolError("an offer of memory that is not mapped")
        manifest, parts = reader.unpack(offer, mapped, body)
        if self._error is None:  # else nobody wants it: let it go
            self.delivery = Delivery(offer, manifest, parts)

    def _on_retract(self, delivery: Delivery) -> None:
        self.delivery = None
        delivery.uncharge(self._budget)
        if delivery.reception is not None:
            delivery.reception.stop()

    @property
    def _host_targets(self) -> Mapping[str, KVMemory]:
        """Made when it is asked for: thousands may wait with targets of their own."""
        return on_host(self._targets)

    def _on_parts(self, frame: Done | Riders | SentDevices, body: bytes) -> None:
        reception = None if self.delivery is None else self.delivery.reception
        if reception is None or reception.transfer != frame.transfer:
            return
        if not isinstance(frame, SentDevices):
            reception.on_parts(frame, body)
        elif self._arrivals is None:
            raise RemoteProtocolError("a part of a GPU that was not asked for")
        else:
            self._arrivals.sent(frame)
            reception.on_done(Done(frame.transfer, frame.part, frame.digest))

    async def _accept_somewhere(self, delivery: Delivery) -> None:
        ways, self._arrivals = self._ways, None
        if ways is not None and may_land_on_gpu(self._targets):
            self._arrivals = ways.arrivals(self._link)
        if self._arrivals is None:
            await self._accept(delivery)
        else:
            await self._accept_on_gpu(delivery, self._arrivals)

    async def _accept_on_gpu(self, delivery: Delivery, arrivals: GpuArrivals) -> None:
        """As :meth:`_accept`, but what does not ride lands where it is wanted."""
        nbytes = delivery.own_nbytes(self._targets)
        await self._budget.reserve(nbytes, in_host=False)
        delivery.charged_bytes = nbytes
        await self.quiesce()  # what was lent to an offer that was retracted
        pool, specs = arrivals.pool, delivery.manifest.specs
        tensors, places = await places_on_gpu(specs, self._targets, pool)
        if not self._stands(delivery):
            delivery.uncharge(self._budget)
            return
        transfer = delivery.offer.transfer
        reception = Reception(
            *(self._link, transfer, places, self),
            has_riders=True,
            payload=arrivals,
            progress=arrivals.progress,
        )
        delivery.tensors, delivery.reception = tensors, reception
        self._names, self._landed = [*tensors], delivery.landed
        if self._targets:
            self._lent += (reception,)
        reception.begin(whole=delivery.is_complete)
        self._stream.send(GrantDevices(transfer, arrivals.digest))

    async def _accept(self, delivery: Delivery) -> None:
        """Make room for an offer, and grant it."""
        nbytes = delivery.own_nbytes(self._host_targets)
        await self._budget.reserve(nbytes)
        delivery.charged_bytes = nbytes
        views = await delivery.allocate(self._host_targets, self._budget)
        await self.quiesce()  # what was lent to an offer that was retracted
        if not self._stands(delivery):
            delivery.uncharge(self._budget)
            return
        transfer = delivery.offer.transfer
        reception = Reception(self._link, transfer, views, self, has_riders=True)
        delivery.reception = reception
        self._names, self._landed = [*delivery.tensors], delivery.landed
        if self._host_targets:
            self._lent += (reception,)
        reception.begin(whole=delivery.is_complete)
        self._stream.send(Grant(transfer))


def check_key_fits(key: bytes, max_body_bytes: int) -> None:
    """Refuse a query that the link cannot carry.

    :raises ValueError: it selects too many tokens
    """
    if len(key) > max_body_bytes:
        raise ValueError(
            f"a query of {len(key) // TOKEN_NBYTES} tokens is longer than the "
            f"{max_body_bytes} bytes that ride in one frame"
        )
