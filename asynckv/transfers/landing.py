"""Where what one query is offered lands: in host memory, or on this side's GPU.

An offer lands here if its bytes neither ride with it nor lie in mapped memory. From
another GPU it lands on this one, but for what rides.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Final

import torch

from asynckv.errors import RemoteProtocolError
from asynckv.links.gpu_link import GpuArrivals, Ways
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import Offer
from asynckv.protocol.transfer_frames import (
    Done,
    Grant,
    GrantDevices,
    Riders,
    SentDevices,
)
from asynckv.tensors.blocks import KVBlocks, KVMemory, memory_of
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.device_tensors import gpu_of
from asynckv.tensors.runs import Memory
from asynckv.transfers.budget import ReceiveBudget
from asynckv.transfers.delivery import Delivery, on_host
from asynckv.transfers.eager import is_eager
from asynckv.transfers.manifest import unpack
from asynckv.transfers.readers import IpcReader, MapReader, ShownArrivals, ShownParts
from asynckv.transfers.reception import PartSink, Reception
from asynckv.transfers.targets import match_targets
from asynckv.types import TensorSpec

__all__ = (
    "Landing",
    "may_land_on_gpu",
    "places_on_gpu",
    "read_offer",
    "ready_memory",
)


_LOOK_AGAIN_S: Final = 1e-3


def may_land_on_gpu(targets: Mapping[str, KVMemory]) -> bool:
    """Whether NCCL can write to all of them: plain tensors of a GPU, and no others."""
    return all(
        not isinstance(target, KVBlocks) and gpu_of(target) is not None
        for target in targets.values()
    )


async def places_on_gpu(
    specs: Mapping[str, TensorSpec],
    targets: Mapping[str, KVMemory],
    pool: DeviceCopyPool,
) -> tuple[dict[str, torch.Tensor], list[Memory | DeviceMemory]]:
    """Return tensors, and their memory; what rides is in host memory, to be lifted.

    Waits until the GPU has done all that it was given with them before. A cancelled
    call leaves nothing.
    """
    tensors, places = dict[str, torch.Tensor](), list[Memory | DeviceMemory]()
    for name, spec in specs.items():
        if is_eager(spec.nbytes):
            tensors[name] = pool.host_empty(spec)
            places.append(memory_of(tensors[name]))
            continue
        target = targets.get(name)
        tensor = target if isinstance(target, torch.Tensor) else pool.empty(spec)
        tensors[name] = tensor
        places.append(await ready_memory(pool.memory_of(tensor)))
    return tensors, places


async def ready_memory(memory: DeviceMemory) -> DeviceMemory:
    """Return memory that nothing is queued for any more. A cancelled call leaves none.

    What the memory waits for is not asked again.
    """
    # Asked, not waited for by a stream: those of CUDA cannot wait for torch's events.
    if (ready := memory.ready) is not None:
        try:
            while not ready.query():  # noqa: ASYNC110 - a GPU tells nobody
                await asyncio.sleep(_LOOK_AGAIN_S)
        finally:
            ready.close()
    return dataclasses.replace(memory, ready=None)


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
            is_compared=arrivals is not None,
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
