"""The asking side of one remote ``get``."""

from __future__ import annotations

import torch

from asynckv.buffers.delivery import Delivery
from asynckv.buffers.landing import Landing, read_offer
from asynckv.buffers.lifting import lift_all, on_host
from asynckv.buffers.receive_budget import ReceiveBudget
from asynckv.errors import PeerLost, RemoteProtocolError
from asynckv.links.answers import Answer, fail_by
from asynckv.links.link import Link
from asynckv.protocol.frames import (
    Cancel,
    Frame,
    Get,
    Offer,
    Result,
    Took,
)
from asynckv.protocol.payload_frames import Done, Riders
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.views import check_into

__all__ = ("Getting",)


class Getting:
    """One value on its way here, on one link. Given up, it needs :meth:`cancel`.

    It lands in memory of ``budget``. ``pool`` is of the GPU that it is wanted on, if it
    is.
    """

    def __init__(
        self,
        link: Link,
        key: str,
        into: torch.Tensor | None,
        budget: ReceiveBudget,
        pool: CopyPool,
    ) -> None:
        self._key = key
        self._link = link
        self._into = into
        self._budget = budget
        self._pool = pool
        self._delivery: Delivery | None = None
        self._landing: Landing | None = None
        self._offer: Answer[Delivery | None] = Answer()
        self._landed: Answer[None] = Answer()
        self._stream = link.open_stream(self, Get(key))

    async def value(self) -> torch.Tensor | None:
        """Return the tensor, verified, or ``None``.

        :raises Exception: what the peer says, or ``PeerLost``
        """
        delivery = await self._offer
        if delivery is None:
            return None
        (record,) = delivery.manifest.records
        targets: dict[str, KVMemory] = {}
        if self._into is not None:
            check_into(self._into, record.spec, self._key)
            targets = {record.name: self._into}
        await self._land(delivery, targets)
        await lift_all(delivery, targets, self._pool)
        if not delivery.offer.inline:
            self._stream.send(Took(b""))
        return delivery.tensors[record.name]

    def release(self) -> None:
        """The tensor is the application's now, or nobody's. Never waits."""
        if self._delivery is not None:
            self._delivery.uncharge(self._budget)
            self._delivery.forget()

    def cancel(self) -> None:
        """The value is not wanted any more. Never waits."""
        self._stream.send(Cancel())
        if self._delivery is not None and self._delivery.reception is not None:
            self._delivery.reception.stop()

    async def quiesce(self) -> None:
        """Wait until nothing touches memory that the caller lent (at most 1 s)."""
        if self._landing is not None:
            await self._landing.quiesce()

    def part_verified(self, index: int, digest: bytes) -> None:
        self._landed.give(None)

    def reception_failed(self, error: Exception) -> None:
        self._landed.fail(error)

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Offer():
                self._on_offer(frame, body)
            case Done() | Riders():
                self._on_parts(frame, body)
            case Result():
                self._offer.give(None)
            case _:
                fail_by(frame, "get", self._fail)

    def on_lost(self, error: PeerLost) -> None:
        self._fail(error)

    def _on_offer(self, offer: Offer, body: bytes) -> None:
        delivery = read_offer(self._link, offer, body, None)
        if len(delivery.manifest.records) != 1:
            delivery.let_go()  # the error would keep it
            raise RemoteProtocolError("a value is one tensor")
        if not self._offer.is_in:  # else nobody wants it: let it go
            self._delivery = delivery
            self._offer.give(delivery)

    def _on_parts(self, frame: Done | Riders, body: bytes) -> None:
        reception = None if self._delivery is None else self._delivery.reception
        if self._landing is not None and reception is not None:
            self._landing.on_parts(reception, frame, body)

    async def _land(self, delivery: Delivery, targets: dict[str, KVMemory]) -> None:
        """Let the value land, verified: in ``targets``, or in memory of its own."""
        if delivery.offer.inline:
            delivery.read_inline(on_host(targets))
        else:
            self._landing = Landing(
                *(self._link, self._stream, targets, self._budget, None)
            )
            await self._landing.accept(delivery, self, self._stands)
            await self._landed

    def _stands(self) -> bool:
        return not self._landed.is_in

    def _fail(self, error: Exception) -> None:
        self._offer.fail(error)
        self._landed.fail(error)
