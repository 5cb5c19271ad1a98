"""Where what one query is offered lands: in host memory, or on this side's GPU.

An offer lands here if its bytes neither ride with it nor lie in mapped memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asynckv.buffers.delivery import Delivery
from asynckv.buffers.gpu_places import may_land_on_gpu, places_on_gpu
from asynckv.buffers.ipc_reader import IpcReader
from asynckv.buffers.lifting import on_host
from asynckv.buffers.manifest import unpack
from asynckv.buffers.map_reader import MapReader
from asynckv.buffers.receive_budget import ReceiveBudget
from asynckv.buffers.shown_arrivals import ShownArrivals, ShownParts
from asynckv.buffers.targets import match_targets
from asynckv.errors import RemoteProtocolError
from asynckv.links.gpu_arrivals import GpuArrivals, Ways
from asynckv.links.link import Link
from asynckv.links.receiving import PartSink, Reception
from asynckv.links.requests import LinkStream
from asynckv.protocol.device_frames import GrantDevices, SentDevices
from asynckv.protocol.frames import Offer
from asynckv.protocol.payload_frames import Done, Grant, Riders
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.runs import Memory

__all__ = ("Landing", "read_offer")


def read_offer(
    link: Link,
    offer: Offer,
    body: bytes,
    reader: MapReader | None,
    *,
    by_parts: bool = False,
) -> Delivery:
    """Return what a peer offers; its bytes may come from now on.

    Who streams reads ``by_parts`` what lies in the peer's memory.

    :raises RemoteProtocolError: it makes no sense
    """
    if offer.mapped is None:
        manifest = unpack(body, inline=offer.inline)
        if not offer.inline:
            link.payload.announce(offer.transfer)
        return Delivery(offer, manifest)
    if by_parts and isinstance(reader, IpcReader) and not offer.inline:
        delivery = Delivery(offer, *reader.unpack_parts(offer, offer.mapped, body))
        link.payload.announce(offer.transfer)  # it may be wanted by lanes
        return delivery
    if reader is None or by_parts or offer.inline or not offer.complete:
        raise RemoteProtocolError("an offer of memory that is not mapped")
    return Delivery(offer, *reader.unpack(offer, offer.mapped, body))


class Landing:
    """Accepts offers, each when the one before it was retracted.

    Made with the first of them: thousands of queries may wait for theirs.
    """

    def __init__(
        self,
        link: Link,
        stream: LinkStream,
        targets: Mapping[str, KVMemory],
        budget: ReceiveBudget,
        ways: Ways | None,
    ) -> None:
        self._link = link
        self._stream = stream
        self._targets = targets
        self._budget = budget
        self._ways = ways
        self._arrivals: GpuArrivals | ShownArrivals | None = None
        self._lent: tuple[Reception, ...] = ()

    async def accept(
        self, delivery: Delivery, sink: PartSink, stands: Callable[[], bool]
    ) -> None:
        """Make room for an offer, and grant it if it still stands then.

        :raises ValueError: memory that the caller lent does not fit the entry
        """
        match_targets(delivery.manifest.specs, self._targets)
        arrivals = self._arrivals = self._next_arrivals(delivery)
        targets = self._targets if arrivals is not None else on_host(self._targets)
        nbytes = delivery.own_nbytes(targets)
        await self._budget.reserve(nbytes, in_host=arrivals is None)
        delivery.charged_bytes = nbytes
        places = await self._places(delivery, targets)
        if not stands():
            delivery.uncharge(self._budget)
            return
        transfer = delivery.offer.transfer
        delivery.reception = reception = Reception(
            *(self._link, transfer, places, sink),
            has_riders=True,
            payload=arrivals,
            progress=None if arrivals is None else arrivals.progress,
        )
        if isinstance(arrivals, GpuArrivals):
            arrivals.call_when_lost(reception.fail)
        if targets:
            self._lent += (reception,)
        reception.begin(whole=delivery.is_complete)
        if arrivals is None:
            self._stream.send(Grant(transfer))
        else:
            self._stream.send(GrantDevices(transfer, arrivals.digest))

    def on_parts(
        self, reception: Reception, frame: Done | Riders | SentDevices, body: bytes
    ) -> None:
        """The peer has sent parts of what was accepted last.

        :raises RemoteProtocolError: it makes no sense
        """
        if not isinstance(frame, SentDevices):
            reception.on_parts(frame, body)
        elif self._arrivals is None:
            raise RemoteProtocolError("a part of a GPU that was not asked for")
        else:
            self._arrivals.sent(frame)
            reception.on_done(Done(frame.transfer, frame.part, frame.digest))

    async def quiesce(self) -> None:
        """Wait until nothing touches memory that the caller lent (at most 1 s)."""
        while self._lent:
            await self._lent[-1].quiesce()
            self._lent = self._lent[:-1]

    def _next_arrivals(self, delivery: Delivery) -> GpuArrivals | ShownArrivals | None:
        if not may_land_on_gpu(self._targets):
            delivery.let_go()
            return None
        if isinstance(delivery.mapped, ShownParts):
            return ShownArrivals(self._link, delivery.mapped)
        if self._ways is None or not delivery.offer.on_gpu:
            return None
        return self._ways.arrivals(self._link)

    async def _places(
        self, delivery: Delivery, targets: Mapping[str, KVMemory]
    ) -> list[Memory | DeviceMemory]:
        if self._arrivals is None:
            memory = await delivery.allocate(targets, self._budget)
            await self.quiesce()  # what was lent to an offer that was retracted
            return [*memory]
        await self.quiesce()
        specs, pool = delivery.manifest.specs, self._arrivals.pool
        delivery.tensors, places = await places_on_gpu(specs, targets, pool)
        return places
