"""The asking side of one remote ``drop_select`` on one link, plain or streaming.

Frames change this object's state; the coroutine that selects waits for a change
and does what is to be done. Memory that the caller lent (``into``) is quiet
before any error reaches the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from asynckv.buffers.asking import ANSWER_S
from asynckv.buffers.delivery import Delivery
from asynckv.buffers.landing import Landing, read_offer
from asynckv.buffers.lifting import on_host
from asynckv.buffers.map_reader import MapReader
from asynckv.buffers.queries import TOKEN_NBYTES, Query
from asynckv.buffers.receive_budget import ReceiveBudget
from asynckv.errors import LeaseLost, PeerLost, RemoteProtocolError
from asynckv.links.answers import Watchers, fail_by
from asynckv.links.gpu_arrivals import Ways
from asynckv.links.link import Link
from asynckv.protocol.device_frames import SentDevices
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
from asynckv.protocol.payload_frames import Done, Riders
from asynckv.tensors.blocks import KVMemory

__all__ = ("Lift", "Selecting", "check_key_fits")

Lift: TypeAlias = Callable[[Delivery, Sequence[str]], Awaitable[None]]
"""Lets some tensors, verified, be where they are wanted. Cancelled, it ends when the
GPU is done."""


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
    _landing: Landing | None = None

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
        self.link = link
        self.targets = targets
        self._budget = budget
        self._streams = streams
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

    async def delivered(self, lift: Lift | None = None) -> Delivery:
        """Wait for an entry; unless the query streams, for all of it, verified.

        An offer that is retracted meanwhile is forgotten; the wait goes on. ``lift`` is
        given the tensors that have landed while others are still to come.

        :raises Exception: what ended the query; ``PeerLost`` if the link did
        """
        while True:
            while (delivery := self.delivery) is None:
                await self.changed()
            await self._take_in(delivery)
            if self._error is not None:
                raise self._error
            lifted = 0
            while self.delivery is delivery:
                if self._streams or delivery.is_whole:
                    return delivery
                names = delivery.landed[lifted:]
                if lift is not None and names:
                    lifted += len(names)
                    await lift(delivery, names)
                else:
                    await self.changed()

    def changed(self) -> asyncio.Future[None]:
        """Return what is done when a frame has changed something.

        :raises Exception: nothing will change any more; what ended the query
        """
        if self._error is not None:
            raise self._error
        return self._watchers.next_change(self.link.loop)

    def reach(self, delivery: Delivery) -> None:
        """The application has it from now on. Never waits."""
        self._stream.send(Reached(delivery.offer.token))

    def settle_at_once(self, delivery: Delivery) -> None:
        """Acknowledge verified receipt of a small entry. Never waits."""
        self._stream.send(Took(delivery.offer.token))
        if not self.link.is_open:
            self._stream.close()  # else its last frame has done so
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
        if self._landing is not None:
            await self._landing.quiesce()

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
                    delivery.has_completed = True
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
        if self._streams and self.delivery is not None:
            self.delivery.let_go()  # nothing more is told of, though nobody leaves yet
        self._watchers.wake()

    def _on_offer(self, offer: Offer, body: bytes) -> None:
        if self.delivery is not None:
            raise RemoteProtocolError("a second offer, the first one stands")
        reader, by_parts = self._reader, self._streams
        delivery = read_offer(self.link, offer, body, reader, by_parts=by_parts)
        # What is mapped, and nobody wants any more, is let go.
        if offer.mapped is None or self._error is None:
            self.delivery = delivery

    def _stands(self, delivery: Delivery) -> bool:
        return self.delivery is delivery and self._error is None

    def _on_retract(self, delivery: Delivery) -> None:
        self.delivery = None
        delivery.let_go()
        delivery.uncharge(self._budget)
        if delivery.reception is not None:
            delivery.reception.stop()

    def _on_parts(self, frame: Done | Riders | SentDevices, body: bytes) -> None:
        reception = None if self.delivery is None else self.delivery.reception
        landing = self._landing
        if reception is None or landing is None:
            return
        if reception.transfer == frame.transfer:
            landing.on_parts(reception, frame, body)

    async def _take_in(self, delivery: Delivery) -> None:
        """Let its bytes land, or read them where they are."""
        reader = self._reader
        if delivery.offer.inline:
            targets = self.targets
            delivery.read_inline(on_host(targets) if targets else targets)
        elif delivery.mapped is not None and reader is not None and not self._streams:
            await reader.take(delivery, self.targets, self._budget, self._stands)
        else:
            if self._landing is None:
                mine = self.targets, self._budget, self._ways
                self._landing = Landing(self.link, self._stream, *mine)
            self._names, self._landed = [*delivery.manifest.specs], delivery.landed
            await self._landing.accept(delivery, self, partial(self._stands, delivery))


def check_key_fits(key: bytes, max_body_bytes: int) -> None:
    """Refuse a query that the link cannot carry.

    :raises ValueError: it selects too many tokens
    """
    if len(key) > max_body_bytes:
        raise ValueError(
            f"a query of {len(key) // TOKEN_NBYTES} tokens is longer than the "
            f"{max_body_bytes} bytes that ride in one frame"
        )
