"""The asking side of one remote ``drop_select``, plain or streaming.

Frames change this object's state; the coroutine that selects waits for a change
and does what is to be done. Memory that the caller lent (``into``) is quiet
before any error reaches the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

import torch

from asynckv.abc import KVEntry
from asynckv.buffers.asking import ANSWER_S
from asynckv.buffers.contents import unflatten
from asynckv.buffers.handover import match_targets
from asynckv.buffers.manifest import INLINE_NBYTES, Manifest, unpack, verify_inline
from asynckv.buffers.queries import TOKEN_NBYTES, Query, tensor_of
from asynckv.buffers.receive_budget import ReceiveBudget
from asynckv.errors import LeaseLost, PeerLost, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.links.receiving import Reception
from asynckv.protocol.failures import from_failure
from asynckv.protocol.frames import (
    Accepted,
    Ack,
    Cancel,
    Cancelled,
    Complete,
    Done,
    Failure,
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
from asynckv.tensors.views import bytes_of, empty_tensor, tensor_from

__all__ = ("Delivery", "Selecting", "check_key_fits")


class Delivery:
    """One offer and what has come of it."""

    def __init__(self, offer: Offer, manifest: Manifest) -> None:
        self.offer = offer
        self.manifest = manifest
        self.is_complete = offer.complete
        self.landed: list[int] = []
        self.tensors: list[torch.Tensor] = []
        self.reception: Reception | None = None
        self.charged_bytes = 0
        self.lent = False

    @property
    def is_whole(self) -> bool:
        """Every part is verified and the entry committed."""
        return self.is_complete and len(self.landed) == len(self.manifest.records)

    @property
    def is_small(self) -> bool:
        """Small enough for an acknowledgement that is not waited for."""
        return self.offer.inline or self.manifest.nbytes <= INLINE_NBYTES

    def entry(self) -> KVEntry:
        """Return the entry, whole."""
        names = [record.name for record in self.manifest.records]
        key, value, hidden, extras = unflatten(
            dict(zip(names, self.tensors, strict=True))
        )
        return KVEntry(
            input_tokens=tensor_of(self.manifest.input_tokens),
            roi=tensor_of(self.manifest.roi),
            key=key,
            value=value,
            hidden=hidden,
            extras=extras,
            entry_id=self.offer.entry_id,
            matched_tokens=self.offer.matched_tokens,
            attempt=self.offer.attempt,
        )


class Selecting:
    """One query on one link."""

    def __init__(
        self,
        link: Link,
        query: Query,
        targets: Mapping[str, torch.Tensor],
        budget: ReceiveBudget,
        *,
        streams: bool = False,
    ) -> None:
        self.delivery: Delivery | None = None
        self.acknowledged = False
        self.noted = False
        self.incarnation = link.peer.incarnation
        self._link = link
        self._targets = targets
        self._budget = budget
        self._old: list[Reception] = []
        self._error: Exception | None = None
        self._is_answered = False
        self._is_accepted = False
        self._watchers: list[asyncio.Future[None]] = []
        key = query.key or b""
        check_key_fits(key, link.limits.max_body_bytes)
        frame = Select(
            has_key=query.key is not None,
            entry_id=query.entry_id,
            match=query.match,
            min_matched_tokens=query.min_matched_tokens,
            stream=streams,
        )
        self._stream = link.open_stream(self, frame, key)

    async def offered(self) -> Delivery:
        """Wait for an offer and let its bytes come.

        :raises Exception: what ended the query; ``PeerLost`` if the link did
        """
        while True:
            if self.delivery is None:
                await self._until(lambda: self.delivery is not None)
            delivery = self.delivery
            if delivery is not None:
                if delivery.offer.inline:
                    self._read_inline(delivery)
                else:
                    await self._accept(delivery)
                if self._error is not None:
                    raise self._error
                if self.delivery is delivery:
                    return delivery

    async def whole(self) -> Delivery:
        """Wait for an entry with all its bytes, verified.

        An offer that is retracted meanwhile is forgotten; the wait goes on.
        """
        while True:
            delivery = await self.offered()
            if not self._is_decided(delivery):
                await self._until(partial(self._is_decided, delivery))
            if self.delivery is delivery:
                return delivery

    async def landed(self, count: int) -> None:
        """Wait until more than ``count`` parts are verified, or all there will be."""
        delivery = self.delivery
        if delivery is None:
            raise RuntimeError("nothing was offered yet")
        total = len(delivery.manifest.records)
        await self._until(lambda: len(delivery.landed) > min(count, total - 1))

    async def committed(self) -> None:
        """Wait until the entry that is streamed is committed."""
        delivery = self.delivery
        if delivery is not None:
            await self._until(lambda: delivery.is_complete)

    def reach(self, delivery: Delivery) -> None:
        """The application has it from now on. Never waits."""
        self._stream.send(Reached(delivery.offer.token))

    def settle_at_once(self, delivery: Delivery) -> None:
        """Acknowledge verified receipt of a small entry. Never waits."""
        self._stream.send(Took(delivery.offer.token))
        self._is_answered = True
        self._stream.close()
        self.release()

    async def settle(self, delivery: Delivery) -> None:
        """Acknowledge verified receipt: at most once, never both used and given back.

        The answer is waited for; a cancellation meanwhile gives the entry back.
        """
        token = delivery.offer.token
        self.acknowledged = True
        self._stream.send(Ack(token, confirm=True))
        async with asyncio.timeout(ANSWER_S):
            await self._until(lambda: self.noted)
        self._stream.send(Reached(token))
        self._is_answered = True
        self._stream.close()

    async def acknowledge(self, delivery: Delivery) -> None:
        """Acknowledge use, and wait for the answer.

        :raises LeaseLost: the entry was taken back meanwhile
        """
        self.acknowledged = True
        self._stream.send(Ack(delivery.offer.token))
        async with asyncio.timeout(ANSWER_S):
            await self._until(lambda: self._is_answered)
        if not self._is_accepted:
            raise self._error or LeaseLost("the peer gave the delivery up")

    def give_back(self, delivery: Delivery, *, reached: bool) -> None:
        """Give the delivery back. Never waits."""
        if not self._is_answered:
            self._stream.send(Nack(delivery.offer.token, reached=reached))
        self._drop()

    def cancel(self) -> None:
        """Wait no longer, and give back what was offered. Never waits."""
        if not self._is_answered:
            self._stream.send(Cancel())
        self._drop()

    def close(self) -> None:
        """Nothing more is read of what was acknowledged. Never waits."""
        self._drop()

    async def quiesce(self) -> None:
        """Wait until nothing touches memory that the caller lent (at most 1 s)."""
        await self._old_quiet()
        delivery = self.delivery
        if delivery is not None and delivery.lent and delivery.reception is not None:
            await delivery.reception.quiesce()

    def release(self) -> None:
        """The tensors are the application's now: no longer charged."""
        if self.delivery is not None and self.delivery.charged_bytes:
            self._budget.release(self.delivery.charged_bytes)
            self.delivery.charged_bytes = 0

    def on_frame(self, frame: Frame, body: bytes) -> None:
        delivery = self.delivery
        match frame:
            case Offer():
                if delivery is not None:
                    raise RemoteProtocolError("a second offer, the first one stands")
                manifest = unpack(body, inline=frame.inline)
                if not frame.inline:
                    self._link.payload.announce(frame.transfer)
                self.delivery = Delivery(frame, manifest)
            case Done(transfer=transfer):
                reception = None if delivery is None else delivery.reception
                if reception is not None and reception.transfer == transfer:
                    reception.on_done(frame)
            case Complete(transfer=transfer) | Retract(transfer=transfer):
                if delivery is not None and delivery.offer.transfer == transfer:
                    self._decide(delivery, frame)
            case Noted():
                self.noted = True
            case Failure():
                self._is_answered = True
                self._error = from_failure(frame)
            case Accepted() | Cancelled():
                self._is_answered = True
                self._is_accepted = isinstance(frame, Accepted)
            case _:
                error = RemoteProtocolError(f"no {type(frame).__name__} belongs here")
                self._is_answered, self._error = True, error
                self._wake()  # of a last frame's stream nobody else is told
                raise error
        self._wake()

    def on_lost(self, error: PeerLost) -> None:
        self._is_answered = True
        self._error = self._error or error
        self._wake()

    def part_verified(self, index: int, digest: bytes) -> None:
        if self.delivery is not None:
            self.delivery.landed.append(index)
        self._wake()

    def reception_failed(self, error: Exception) -> None:
        self._error = error
        self._wake()

    async def _accept(self, delivery: Delivery) -> None:
        """Make room for an offer, and grant it."""
        specs = delivery.manifest.specs
        match_targets(specs, self._targets)
        own = sum(spec.nbytes for n, spec in specs.items() if n not in self._targets)
        await self._budget.reserve(own)
        delivery.charged_bytes = own
        delivery.lent = bool(self._targets)
        delivery.tensors = [
            self._targets[name] if name in self._targets else empty_tensor(spec)
            for name, spec in specs.items()
        ]
        await self._old_quiet()
        if self.delivery is not delivery or self._error is not None:
            self._budget.release(own)
            delivery.charged_bytes = 0
            return
        views = [bytes_of(tensor) for tensor in delivery.tensors]
        transfer = delivery.offer.transfer
        delivery.reception = Reception(self._link, transfer, views, self)
        delivery.reception.begin()
        self._stream.send(Grant(transfer))

    def _read_inline(self, delivery: Delivery) -> None:
        if self._targets:
            match_targets(delivery.manifest.specs, self._targets)
        verify_inline(delivery.manifest)
        for record, piece in zip(
            delivery.manifest.records, delivery.manifest.inline, strict=True
        ):
            target = self._targets.get(record.name)
            if target is None:
                target = tensor_from(piece, record.spec)
            else:
                bytes_of(target)[:] = piece  # at most 64 KiB
            delivery.tensors.append(target)
        delivery.landed = list(range(len(delivery.tensors)))

    def _is_decided(self, delivery: Delivery) -> bool:
        return self.delivery is not delivery or delivery.is_whole

    def _decide(self, delivery: Delivery, frame: Frame) -> None:
        if isinstance(frame, Complete):
            delivery.is_complete = True
            return
        self.delivery = None
        self._budget.release(delivery.charged_bytes)
        delivery.charged_bytes = 0
        if delivery.reception is not None:
            delivery.reception.stop()
            if delivery.lent:
                self._old.append(delivery.reception)

    async def _old_quiet(self) -> None:
        """Let go of what was lent to offers that were retracted."""
        while self._old:
            await self._old[0].quiesce()
            self._old.pop(0)

    def _drop(self) -> None:
        self._error = self._error or RuntimeError("this drop_select is over")
        if self.delivery is not None and self.delivery.reception is not None:
            self.delivery.reception.stop()
        self.release()

    async def _until(self, predicate: Callable[[], bool]) -> None:
        while not predicate():
            if self._error is not None:
                raise self._error
            watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watchers.append(watcher)
            await watcher

    def _wake(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)


def check_key_fits(key: bytes, max_body_bytes: int) -> None:
    """Refuse a query that the link cannot carry.

    :raises ValueError: it selects too many tokens
    """
    if len(key) > max_body_bytes:
        raise ValueError(
            f"a query of {len(key) // TOKEN_NBYTES} tokens is longer than the "
            f"{max_body_bytes} bytes that ride in one frame"
        )
