"""What one query is offered, and where it is received: on the host, or on a GPU.

An offer is received if its bytes neither come along nor lie in mapped memory.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.tensors import gpu_of
from asynckv.errors import RemoteProtocolError
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import Offer
from asynckv.protocol.transfer import EAGER_NBYTES
from asynckv.tensors.blocks import KVBlocks, KVMemory, tensor_at
from asynckv.tensors.views import bytes_of, memory_of
from asynckv.transfers.delivery import Delivery, goes_to_gpu, is_on_gpu
from asynckv.transfers.incoming import Incoming, Route
from asynckv.transfers.manifest import Layout, unpack
from asynckv.transfers.readers import (
    ExportedParts,
    IpcReader,
    IpcStreamRoute,
    MapReader,
)
from asynckv.transfers.routes import PeerRoutes
from asynckv.transfers.targets import (
    HostTarget,
    Target,
    TensorTarget,
    match_targets,
)
from asynckv.types import TensorSpec

__all__ = ("OfferReceiver", "read_offer", "ready_memory")


_AT_A_TIME: Final = 16
"""Tensors take their time to be made, on the loop."""

_LOOK_AGAIN_S: Final = 1e-3


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
        delivery = Delivery(offer, *reader.unpack_parts(offer.mapped, body))
        link.payload.announce(offer.transfer)  # it may be wanted by lanes
        return delivery
    if reader is None or by_parts or offer.inline or not offer.complete:
        raise RemoteProtocolError("an offer of memory that is not mapped")
    return Delivery(offer, *reader.unpack(offer.mapped, body))


async def _prepare(target: TensorTarget, *, is_routed: bool) -> None:
    """Make what it lands in: on the GPU, or before it.

    Waits until the GPU has done all that it was given with it before. A cancelled call
    leaves nothing.
    """
    if is_routed and target.pool.device is not None:
        memory = target.pool.memory_of(tensor_at(target.place()))
        target.ready(await ready_memory(memory))
    else:
        target.host()


def _is_plain_on_gpu(memory: KVMemory) -> bool:
    """Can one GPU write to it for another: is it a plain tensor there?"""
    return not isinstance(memory, KVBlocks) and gpu_of(memory) is not None


class OfferReceiver:
    """Receives what one query is offered, each when the one before it was retracted.

    In ``targets``, or where ``routes`` receive. Made with the first offer: thousands of
    queries may wait for theirs.
    """

    def __init__(
        self,
        stream: LinkStream,
        targets: Mapping[str, KVMemory],
        routes: PeerRoutes,
    ) -> None:
        self._stream = stream
        self._into = targets
        self._routes = routes
        self._budget = routes.budget
        self._lent: tuple[Incoming, ...] = ()

    async def accept(
        self,
        delivery: Delivery,
        landed: Callable[[], None],
        failed: Callable[[Exception], None],
        stands: Callable[[], bool],
    ) -> None:
        """Make room for an offer, and grant it if it still stands then.

        Each part that ``landed`` is told of is in the delivery.

        :raises ValueError: memory that the caller lent does not fit the entry
        """
        layout = delivery.manifest.layout
        if self._into:
            match_targets(layout.specs, self._into)
        route = self._route(delivery)
        nbytes = self._nbytes(layout, in_host=route is None)
        await self._budget.reserve(nbytes, in_host=route is None)
        delivery.charged_bytes = nbytes
        try:
            targets = await self._targets(delivery, layout.specs, route)
            if self._lent:
                await self.quiesce()  # what was lent to an offer that was retracted
        except BaseException:
            delivery.uncharge(self._budget)  # it may have been retracted meanwhile
            raise
        if not stands():
            delivery.uncharge(self._budget)
            return
        places = {n: t for n, t in targets.items() if isinstance(t, TensorTarget)}
        delivery.incoming = incoming = Incoming(
            *(self._stream, delivery.offer.transfer, [*targets.values()]),
            partial(_landed, delivery, [*targets], places, landed),
            failed,
            route=None if route is None else lambda: route,
            room=partial(self._reserve_in_host, delivery),
        )
        del targets  # the transport's alone, while it is received
        if self._into:
            self._lent += (incoming,)
        incoming.grant(whole=delivery.is_complete)

    async def quiesce(self) -> None:
        """Wait until nothing touches memory that the caller lent (at most 1 s)."""
        while self._lent:
            await self._lent[-1].quiesce()
            self._lent = self._lent[:-1]

    def _route(self, delivery: Delivery) -> Route | None:
        """Return by what it can come to the GPU from another, if by anything."""
        if not all(map(_is_plain_on_gpu, self._into.values())):
            delivery.release()
            return None
        if isinstance(delivery.mapped, ExportedParts):
            return IpcStreamRoute(self._stream.link, delivery.mapped)
        if not delivery.offer.on_gpu:
            return None
        return self._routes.device_route(self._stream.link)

    def _nbytes(self, layout: Layout, *, in_host: bool) -> int:
        """Return how many bytes need memory that the caller has not lent."""
        nbytes = 0
        for name, part_nbytes in zip(layout.specs, layout.sizes, strict=True):
            into = self._into.get(name)
            is_bounced = in_host or part_nbytes <= EAGER_NBYTES
            if into is None or (is_bounced and is_on_gpu(into)):
                nbytes += part_nbytes
        return nbytes

    async def _reserve_in_host(self, delivery: Delivery) -> None:
        """Charge it for coming through memory of the host after all."""
        # Two that each hold some, and wait for more, would wait for ever.
        delivery.uncharge(self._budget)
        nbytes = self._nbytes(delivery.manifest.layout, in_host=True)
        await self._budget.reserve(nbytes)
        delivery.charged_bytes = nbytes

    async def _targets(
        self,
        delivery: Delivery,
        specs: Mapping[str, TensorSpec],
        route: Route | None,
    ) -> dict[str, Target]:
        """Return where each tensor is to land. A cancelled call leaves nothing."""
        targets, empty, pool = (
            dict[str, Target](),
            self._budget.empty,
            self._routes.pool,
        )
        for count, (name, spec) in enumerate(specs.items(), 1):
            into = self._into.get(name)
            if goes_to_gpu(into, pool):
                is_alone = route is not None and spec.nbytes <= EAGER_NBYTES
                bounce = pool.host_empty if is_alone else empty
                targets[name] = target = TensorTarget(spec, into, pool, empty=bounce)
                await _prepare(target, is_routed=route is not None and not is_alone)
            elif into is None:
                delivery.tensors[name] = tensor = empty(spec)
                targets[name] = HostTarget(bytes_of(tensor))
            else:
                delivery.tensors[name] = tensor_at(into)
                targets[name] = HostTarget(memory_of(into))
            if not count % _AT_A_TIME:
                await asyncio.sleep(0)
        return targets


def _landed(
    delivery: Delivery,
    names: list[str],
    places: dict[str, TensorTarget],
    landed: Callable[[], None],
    part: int,
    _: bytes,
) -> None:
    name = names[part]
    if name in places:
        delivery.tensors[name] = tensor_at(places.pop(name).place())
    delivery.landed.append(name)
    landed()
