"""The asking side of remote ``drop_select``, plain or streaming.

Frames change the state of one selection; the coroutine that selects waits for a change
and does what is to be done, on one link after the other while links are cut. Memory
that the caller lent (``into``) is quiet before any error reaches the caller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

import torch

from asynckv.abc import KVEntry, SelectStream
from asynckv.buffers.remote.connection import ANSWER_S, PeerConnection, ask
from asynckv.errors import (
    EntryAborted,
    LeaseLost,
    PeerLost,
    PeerRestarted,
    RemoteProtocolError,
)
from asynckv.links.link import Link
from asynckv.observability.waits import LoggedWaits
from asynckv.protocol.failures import fail_by
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
    Settle,
    Took,
)
from asynckv.protocol.transfer_frames import Eager, Sent
from asynckv.tensors.blocks import KVMemory
from asynckv.transfers.delivery import Delivery, move_to_device, moved_to_device
from asynckv.transfers.offers import OfferReceiver, read_offer
from asynckv.transfers.readers import MapReader, Unreadable
from asynckv.transfers.routes import PeerRoutes
from asynckv.transfers.tokens import TOKEN_NBYTES, Query, tensor_of
from asynckv.types import TensorSpec
from asynckv.waits.waiting import Watchers

__all__ = (
    "RemoteConsumer",
    "RemoteSelect",
    "RemoteStream",
    "check_key_fits",
)


logger = logging.getLogger(__name__)


class RemoteSelect:
    """One query on one link. ``delivery`` is the offer that stands, if one does."""

    delivery: Delivery | None = None
    may_have_counted = False
    _error: Exception | None = None
    _is_acknowledged = False
    _is_noted = False
    _is_answered = False
    _is_accepted = False
    _receiver: OfferReceiver | None = None

    def __init__(
        self,
        link: Link,
        query: Query,
        targets: Mapping[str, KVMemory],
        routes: PeerRoutes,
        *,
        streams: bool = False,
        views: bool = False,
    ) -> None:
        self.routes = routes
        self._views = views
        self.query = query
        self.link = link
        self.targets = targets
        self._streams = streams
        self._watchers = Watchers()
        key = query.key
        if key is not None:
            check_key_fits(key, link.limits.max_body_bytes)
        by = query.entry_id, query.match, query.min_matched_tokens, streams
        self._stream = link.open_stream(self, Select(key is not None, *by), key or b"")

    async def delivered(self) -> Delivery:
        """Wait for an entry; unless the query streams, for all of it, verified.

        An offer that is retracted meanwhile is forgotten; the wait goes on.

        :raises Exception: what ended the query; ``PeerLost`` if the link did
        """
        while True:
            while (delivery := self.delivery) is None:
                await self.changed()
            if delivery.offer.inline:
                delivery.read_inline(self.targets)
            else:
                await self._take_in(delivery)
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
        if self._reader() is None:  # else one more offer may be under way: see there
            self._stream.close()

    async def acknowledge(self, delivery: Delivery) -> None:
        """Acknowledge use, and wait for the answer.

        What has not come by now is not wanted, nor is it missed if it came wrong.

        :raises LeaseLost: the entry was taken back meanwhile
        """
        self._is_acknowledged = True
        if delivery.incoming is not None and not delivery.is_whole:
            delivery.incoming.stop()
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
        self._let_go()
        self._watchers.wake()

    async def quiesce(self) -> None:
        """Wait until nothing touches memory that the caller lent (at most 1 s)."""
        if self._receiver is not None:
            await self._receiver.quiesce()

    def release(self) -> None:
        """The tensors are the application's now: no longer charged."""
        if self.delivery is not None:
            self.delivery.uncharge(self.routes.budget)

    def on_frame(self, frame: Frame, body: bytes) -> None:
        delivery = self.delivery
        match frame:
            case Offer():
                self._on_offer(frame, body)
            case Sent() | Eager():
                incoming = None if delivery is None else delivery.incoming
                if incoming is not None and incoming.transfer == frame.transfer:
                    incoming.on_frame(frame, body)
                return  # what has landed by it is told of
            case Complete(transfer=transfer):
                if delivery is not None and delivery.offer.transfer == transfer:
                    delivery.has_completed = True
                    if delivery.incoming is not None:
                        delivery.incoming.expect()
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

    def _cannot_land(self, delivery: Delivery, error: Exception) -> None:
        self._error = error
        if not self._streams:  # else some of it was handed out
            delivery.forget()
        self._watchers.wake()

    def _fail(self, error: Exception) -> None:
        self._is_answered = True
        self._error = error
        if self._streams:  # nobody leaves yet, and others wait for its room
            self._let_go()
        self._watchers.wake()

    def _let_go(self) -> None:
        """Nothing more of what was offered comes, or is read."""
        if self.delivery is not None:
            self.delivery.release()
            if self.delivery.incoming is not None:
                self.delivery.incoming.stop()
        self.release()

    def _on_offer(self, offer: Offer, body: bytes) -> None:
        if self.delivery is not None:
            raise RemoteProtocolError("a second offer, the first one stands")
        reader = None if offer.mapped is None else self._reader()
        by_parts = self._streams
        delivery = read_offer(self.link, offer, body, reader, by_parts=by_parts)
        delivery.tensor_from = self.routes.budget.small.tensor
        # What is mapped, and nobody wants any more, is let go.
        if offer.mapped is None or self._error is None:
            self.delivery = delivery

    def _reader(self) -> MapReader | None:
        """Return what reads the memory that the link shows, if it does."""
        return self.routes.reader(self.link, views=self._views)

    def _stands(self, delivery: Delivery) -> bool:
        return self.delivery is delivery and self._error is None

    def _on_retract(self, delivery: Delivery) -> None:
        self.delivery = None
        delivery.release()
        delivery.uncharge(self.routes.budget)
        if delivery.incoming is not None:
            delivery.incoming.stop()

    async def _take_in(self, delivery: Delivery) -> None:
        """Read its bytes where they are; or let them land, also if that fails."""
        routes = self.routes
        is_read = delivery.mapped is not None and not self._streams
        if is_read and (reader := self._reader()) is not None:
            try:
                await reader.take(delivery, self.targets, routes.budget, self._stands)
            except Unreadable as exc:
                why = str(exc)  # a record of the error would keep what was mapped
                logger.warning("an entry is received, not read where it lies: %s", why)
                delivery.release()
                delivery.uncharge(routes.budget)
                self.link.payload.announce(delivery.offer.transfer)
            else:
                return
        if self._receiver is None:
            self._receiver = OfferReceiver(self._stream, self.targets, routes)
        await self._receiver.accept(
            delivery,
            self._watchers.wake,
            partial(self._cannot_land, delivery),
            partial(self._stands, delivery),
        )


def check_key_fits(key: bytes, max_body_bytes: int) -> None:
    """Refuse a query that the link cannot carry.

    :raises ValueError: it selects too many tokens
    """
    if len(key) > max_body_bytes:
        raise ValueError(
            f"a query of {len(key) // TOKEN_NBYTES} tokens is longer than the "
            f"{max_body_bytes} bytes that ride in one frame"
        )


class RemoteStream(SelectStream):
    """Hands out each tensor once it is verified, where it is wanted."""

    def __init__(self, selecting: RemoteSelect, delivery: Delivery) -> None:
        offer, manifest = delivery.offer, delivery.manifest
        self.entry_id = offer.entry_id
        self.attempt = offer.attempt
        self.matched_tokens = offer.matched_tokens
        self.input_tokens = tensor_of(manifest.input_tokens)
        self.roi = tensor_of(manifest.roi)
        self.specs: Mapping[str, TensorSpec] = manifest.layout.specs
        self._selecting = selecting
        self._delivery = delivery
        self._tensors: dict[str, torch.Tensor] = {}
        self._next = 0
        self._is_closed = False

    async def __anext__(self) -> tuple[str, torch.Tensor]:
        self._check_open()
        landed = self._delivery.landed
        if self._next >= len(self.specs):
            while not self._delivery.is_complete:
                await self._selecting.changed()
            raise StopAsyncIteration
        while len(landed) <= self._next:
            await self._selecting.changed()
        name = landed[self._next]
        tensor = await self._tensor(name)
        self._next += 1
        return name, tensor

    async def wait_for(self, name: str) -> torch.Tensor:
        self._check_open()
        if name not in self.specs:
            raise KeyError(name)
        while name not in self._delivery.landed:
            await self._selecting.changed()
        return await self._tensor(name)

    async def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            targets, pool = self._selecting.targets, self._selecting.routes.pool
            moving = moved_to_device(self._delivery, name, targets, pool)
            self._tensors[name] = await moving
        return self._tensors[name]

    def close(self) -> None:
        """No more tensors."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the stream was left already")


class RemoteConsumer:
    """The three ways to take an entry from the lookup buffer of ``peer``."""

    def __init__(self, peer: PeerConnection) -> None:
        self._peer = peer
        self._waits = LoggedWaits(_who_waits, "a match", f"an insert at {peer.url}")

    @property
    def waiting(self) -> int:
        """How many calls wait for an entry, or for its bytes."""
        return len(self._waits)

    async def take(self, query: Query, targets: Mapping[str, KVMemory]) -> KVEntry:
        """Do what awaiting a ``drop_select`` does."""
        while True:
            selecting, delivery = await self._select(query, targets)
            if delivery.is_small:
                selecting.settle_at_once(delivery)
                return delivery.entry()
            if await self._settle(selecting, delivery):
                return delivery.entry()

    @asynccontextmanager
    async def borrow(
        self, query: Query, targets: Mapping[str, KVMemory]
    ) -> AsyncIterator[KVEntry]:
        """Do what entering a ``drop_select`` does."""
        selecting, delivery = await self._select(query, targets, views=True)
        lent = [delivery.entry()]
        delivery.forget()
        selecting.release()
        try:
            selecting.reach(delivery)
            yield lent.pop()  # kept by nobody here: its memory may be another's
        except BaseException as exc:
            await _give_back(selecting, delivery, exc)
            raise
        await self._acknowledge(selecting, delivery)

    @asynccontextmanager
    async def stream(
        self, query: Query, targets: Mapping[str, KVMemory]
    ) -> AsyncIterator[SelectStream]:
        """Do what entering an ``open_drop_select`` does."""
        selecting, delivery = await self._select(query, targets, streams=True)
        stream = RemoteStream(selecting, delivery)
        try:
            selecting.reach(delivery)
            yield stream
            stream.close()
        except BaseException as exc:
            await _give_back(selecting, delivery, exc)
            raise
        await self._acknowledge(selecting, delivery)

    async def _select(
        self,
        query: Query,
        targets: Mapping[str, KVMemory],
        *,
        streams: bool = False,
        views: bool = False,
    ) -> tuple[RemoteSelect, Delivery]:
        while True:
            # Each of thousands that wait has this frame: it is kept small.
            peer = self._peer
            link = peer.link_nowait() or await peer.link()
            selecting = RemoteSelect(
                *(link, query, targets, peer.routes), streams=streams, views=views
            )
            self._waits.begin(selecting)
            try:
                peer.budget.small.prepare()
                delivery = await selecting.delivered()
                if delivery.incoming is None and not streams:
                    await move_to_device(delivery, targets, peer.pool)
                return selecting, delivery
            except BaseException as exc:
                if not await _may_ask_again(selecting, exc):
                    raise
            finally:
                self._waits.end(selecting)

    async def _settle(self, selecting: RemoteSelect, delivery: Delivery) -> bool:
        """Acknowledge receipt of what is not small; ``False`` if it did not count."""
        try:
            await selecting.settle(delivery)
        except PeerLost:
            selecting.close()
            await selecting.quiesce()
            return await self._counted(selecting, delivery)
        except LeaseLost:
            selecting.cancel()
            return False
        except BaseException:
            selecting.cancel()
            raise
        selecting.release()
        return True

    async def _counted(self, selecting: RemoteSelect, delivery: Delivery) -> bool:
        """The link was cut around the acknowledgement: ask on the next one."""
        question = Settle(delivery.offer.entry_id, delivery.offer.token)
        asked = selecting.link.peer.incarnation  # it changes when memory was lost
        answer = await ask(self._peer, question, incarnation=asked)
        return bool(answer.value)

    async def _has_counted(self, selecting: RemoteSelect, delivery: Delivery) -> bool:
        """As :meth:`_counted`; ``False`` if there is nobody left to ask."""
        try:
            return selecting.may_have_counted and await self._counted(
                selecting, delivery
            )
        except (PeerLost, PeerRestarted):
            return False

    async def _acknowledge(self, selecting: RemoteSelect, delivery: Delivery) -> None:
        try:
            await selecting.acknowledge(delivery)
        except PeerLost as exc:
            if not await self._has_counted(selecting, delivery):
                raise LeaseLost(
                    f"the link was lost before entry {delivery.offer.entry_id!r} was "
                    "acknowledged; it was given back",
                ) from exc
        except EntryAborted as exc:
            raise LeaseLost(
                f"entry {delivery.offer.entry_id!r} left before it was acknowledged"
            ) from exc
        finally:
            selecting.close()
            await selecting.quiesce()


async def _may_ask_again(selecting: RemoteSelect, error: BaseException) -> bool:
    """End what has failed before anything of it was handed out; whether to go on."""
    if isinstance(error, PeerLost | EntryAborted):
        selecting.close()
    else:
        selecting.cancel()
    await selecting.quiesce()
    if isinstance(error, PeerLost):
        return not selecting.link.is_open  # else the peer says so, of something else
    return isinstance(error, EntryAborted) and error.reason != "taken"


async def _give_back(
    selecting: RemoteSelect, delivery: Delivery, error: BaseException
) -> None:
    """The application is done with it, but by an error, or cancelled."""
    selecting.give_back(delivery, reached=isinstance(error, Exception))
    await selecting.quiesce()


def _who_waits(selecting: RemoteSelect) -> str:
    key = selecting.query.key
    tokens = "any" if key is None else len(key) // TOKEN_NBYTES
    return f"drop_select of {tokens} tokens"
