"""What is offered is granted when its place is there, if it still stands."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import Server
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.growth import Growth
from asynckv.errors import PeerLost, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.protocol.frames import Frame, Offer, Select
from asynckv.protocol.transfer_frames import (
    Eager,
    Grant,
    Sent,
)
from asynckv.protocol.values import MappedOffer
from asynckv.protocol.wire import digest_of
from asynckv.sharing.gpu_channel import NcclRoute
from asynckv.tensors.views import bytes_of
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.delivery import Delivery, ReceiveBudget
from asynckv.transfers.offers import OfferReceiver, read_offer, ready_memory
from asynckv.types import TensorSpec
from harness.bodies import body_with
from harness.fake_gpus import FakeGpus
from harness.fake_gpus.streams import Delay
from harness.link_pairs import Hearer, LinkPair, NoRoutes, linked
from harness.nccl_buffer_pairs import NcclBuffers, open_nccl_buffers

BODY = body_with({"key": TensorSpec((MIB,), "uint8")})


class ByNccl(NoRoutes):
    """What leads from GPU to GPU between ``gpus``."""

    def __init__(self, gpus: NcclBuffers, budget: ReceiveBudget) -> None:
        super().__init__(gpus.peer.pool, budget)
        self._gpus = gpus

    def device_route(self, link: Link) -> NcclRoute:
        assert isinstance(self.pool, CopyPool)
        return NcclRoute(self._gpus.near_way, self.pool)


@dataclasses.dataclass
class Ground:
    """A query's end of a stream; it is told of what lands, too."""

    links: LinkPair
    budget: ReceiveBudget
    verified: list[str] = dataclasses.field(default_factory=list)
    gpus: NcclBuffers | None = None

    def landed(self, delivery: Delivery) -> None:
        self.verified = [*delivery.landed]

    def failed(self, error: Exception) -> None:
        raise error

    async def accept(
        self,
        receiver: OfferReceiver,
        delivery: Delivery,
        stands: Callable[[], bool] = lambda: True,
    ) -> None:
        await receiver.accept(
            delivery, lambda: self.landed(delivery), self.failed, stands
        )

    def receiver(self, **targets: torch.Tensor) -> OfferReceiver:
        stream = self.links.near.open_stream(Hearer(), Select(has_key=False))
        routes = NoRoutes(budget=self.budget)
        if self.gpus is not None:
            routes = ByNccl(self.gpus, self.budget)
        return OfferReceiver(stream, targets, routes)

    def offer(self, transfer: int = 2, body: bytes = BODY) -> Delivery:
        offer = Offer(transfer, inline=False, on_gpu=self.gpus is not None)
        return read_offer(self.links.near, offer, body, None)

    async def heard(self, count: int = 1) -> list[Frame]:
        """Return what the peer was sent, once it is so much."""
        hearers = self.links.service.hearers
        await until(lambda: bool(hearers) and len(hearers[0].frames) >= count)
        return [frame for frame, _ in hearers[0].frames]


@pytest.fixture
async def ground() -> AsyncIterator[Ground]:
    async with linked("mem://", lambda *_: None) as links:
        memory = Growth(4 * MIB)
        yield Ground(links, ReceiveBudget(4 * MIB, memory))
        await memory.aclose()


@pytest.fixture
async def between_gpus(two_gpus: FakeGpus, ground: Ground) -> AsyncIterator[Ground]:
    async with open_nccl_buffers(two_gpus, digest="off", serves="off") as gpus:
        ground.gpus = gpus
        yield ground


@pytest.mark.parametrize(
    ("inline", "complete", "is_mapped"),
    [(False, True, False), (True, True, True), (False, False, True)],
)
async def test_what_is_offered_in_memory_that_is_not_mapped_is_refused(
    mappable: Server, inline: bool, complete: bool, is_mapped: bool
) -> None:
    mapped = MappedOffer(1, 0)
    offer = Offer(2, inline=inline, complete=complete, mapped=mapped)
    async with connect(mappable.url) as peer:
        link = peer._linked()
        reader = peer.routes.reader(link, views=False) if is_mapped else None
        assert (reader is not None) is is_mapped
        with pytest.raises(RemoteProtocolError, match="that is not mapped"):
            read_offer(link, offer, BODY, reader)


async def test_a_stream_is_shown_nothing_in_mapped_memory(mappable: Server) -> None:
    offer = Offer(2, inline=False, mapped=MappedOffer(1, 0))
    async with connect(mappable.url) as peer:
        reader = peer.routes.reader(peer._linked(), views=False)
        assert reader is not None
        with pytest.raises(RemoteProtocolError, match="that is not mapped"):
            read_offer(peer._linked(), offer, BODY, reader, by_parts=True)


async def test_what_was_granted_lands_and_is_verified(ground: Ground) -> None:
    receiver, delivery, data = ground.receiver(), ground.offer(), bytes_of(noise(MIB))
    await ground.accept(receiver, delivery)
    assert await ground.heard() == [Grant(2)]
    assert delivery.charged_bytes == ground.budget.used_bytes == MIB
    assert delivery.incoming is not None
    ground.links.far.payload.send(2, 0, data, lambda *_: None)
    delivery.incoming.on_frame(Sent(2, 0, digest_of(data)), b"")
    await until(lambda: ground.verified == ["key"])
    assert is_same(delivery.tensors["key"], noise(MIB))


async def test_what_is_small_comes_along(ground: Ground) -> None:
    body = body_with({"key": TensorSpec((8,), "uint8")})
    receiver, delivery = ground.receiver(), ground.offer(body=body)
    await ground.accept(receiver, delivery)
    piece = bytes(bytes_of(noise(8)))
    assert delivery.incoming is not None
    riders = Eager(2, (0,), (digest_of(piece),))
    delivery.incoming.on_frame(riders, piece)
    assert ground.verified == ["key"] and is_same(delivery.tensors["key"], noise(8))


async def test_an_offer_that_does_not_stand_any_more_is_not_granted(
    ground: Ground,
) -> None:
    receiver, gone = ground.receiver(), ground.offer()
    await ground.accept(receiver, gone, lambda: False)
    assert gone.incoming is None and not gone.charged_bytes
    assert not ground.budget.used_bytes
    await ground.accept(receiver, ground.offer(4))
    assert await ground.heard() == [Grant(4)]


async def test_memory_that_was_lent_is_not_granted_twice_before_it_is_quiet(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, quiet = ground.receiver(key=noise(MIB)), asyncio.Event()
    payload = ground.links.near.payload
    await ground.accept(receiver, ground.offer(2))
    monkeypatch.setattr(payload, "quiesce", lambda transfer: quiet.wait())
    accepting = asyncio.create_task(ground.accept(receiver, ground.offer(4)))
    await until_blocked(accepting)
    assert await ground.heard() == [Grant(2)] and not ground.budget.used_bytes
    quiet.set()
    await accepting
    assert await ground.heard(2) == [Grant(2), Grant(4)]


async def test_between_gpus_it_lands_on_the_gpu(between_gpus: Ground) -> None:
    receiver, delivery = between_gpus.receiver(), between_gpus.offer()
    await between_gpus.accept(receiver, delivery)
    assert await between_gpus.heard() == [Grant(2, "nccl", "off")]
    gpus, incoming = between_gpus.gpus, delivery.incoming
    assert gpus is not None and incoming is not None
    assert isinstance(gpus.buffer.pool, CopyPool)
    memory = gpus.buffer.pool.memory_of(gpus.ours.tensor(noise(MIB)))
    source = await ready_memory(memory)
    gpus.way.transport.send(2, 0, source, lambda *_: None)
    incoming.on_frame(Sent(2, 0, b"", "off", "nccl"), b"")
    await until(lambda: between_gpus.verified == ["key"])
    assert delivery.tensors["key"].is_cuda
    assert is_same(delivery.tensors["key"], noise(MIB))


async def test_what_is_wanted_in_host_memory_is_granted_there(
    between_gpus: Ground,
) -> None:
    key = noise(MIB)
    receiver, delivery = between_gpus.receiver(key=key), between_gpus.offer()
    await between_gpus.accept(receiver, delivery)
    assert await between_gpus.heard() == [Grant(2)]
    assert delivery.tensors["key"] is key


async def test_an_offer_that_ends_while_the_gpu_is_at_its_place_is_not_granted(
    between_gpus: Ground,
) -> None:
    gpus, standing = between_gpus.gpus, [True]
    assert gpus is not None
    receiver = between_gpus.receiver(key=gpus.theirs.tensor(noise(MIB)))
    gpus.theirs.tensors.stream(1).add(Delay(50))
    delivery = between_gpus.offer()
    accepting = asyncio.create_task(
        between_gpus.accept(receiver, delivery, lambda: bool(standing))
    )
    await until_blocked(accepting)
    standing.clear()
    await accepting
    assert delivery.incoming is None and not between_gpus.budget.used_bytes
    await between_gpus.accept(receiver, between_gpus.offer(4))
    assert await between_gpus.heard() == [Grant(4, "nccl", "off")]


async def test_what_a_route_has_lost_is_charged_for_coming_through_the_host(
    between_gpus: Ground,
) -> None:
    gpus = between_gpus.gpus
    assert gpus is not None
    key = gpus.theirs.tensor(noise(MIB, 1) * 0)
    receiver, delivery = between_gpus.receiver(key=key), between_gpus.offer()
    await between_gpus.accept(receiver, delivery)
    assert not delivery.charged_bytes and delivery.incoming is not None
    gpus.near_way._stalled(PeerLost("nothing has come for long"))
    assert await between_gpus.heard(2) == [Grant(2, "nccl", "off"), Grant(2)]
    assert delivery.charged_bytes == between_gpus.budget.used_bytes == MIB
    data = bytes_of(noise(MIB, 1))
    between_gpus.links.far.payload.send(2, 0, data, lambda *_: None)
    delivery.incoming.on_frame(Sent(2, 0, digest_of(data)), b"")
    await until(lambda: between_gpus.verified == ["key"])
    assert delivery.tensors["key"] is key and is_same(key, noise(MIB, 1))
    await receiver.quiesce()


async def test_an_offer_that_ends_while_its_route_is_lost_is_charged_no_more(
    between_gpus: Ground,
) -> None:
    gpus, budget = between_gpus.gpus, between_gpus.budget
    assert gpus is not None
    await budget.reserve(budget.max_bytes)
    key = gpus.theirs.tensor(noise(MIB, 1))
    receiver, delivery = between_gpus.receiver(key=key), between_gpus.offer()
    await between_gpus.accept(receiver, delivery)
    gpus.near_way._stalled(PeerLost("nothing has come for long"))
    await until_blocked()
    assert await between_gpus.heard() == [Grant(2, "nccl", "off")]
    await receiver.quiesce()
    budget.release(budget.max_bytes)
    assert not budget.used_bytes and not delivery.charged_bytes


async def test_memory_that_nobody_uses_is_ready() -> None:
    memory = DeviceMemory(1, 1, 0)
    assert await ready_memory(memory) == memory


async def test_an_offer_that_ends_while_its_places_are_made_is_charged_no_more(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery, receiver = ground.offer(), ground.receiver()
    accepting = asyncio.create_task(ground.accept(receiver, delivery))
    targets = OfferReceiver._targets

    async def cancelled(receiver: OfferReceiver, *args: Any) -> Any:
        accepting.cancel()
        await asyncio.sleep(0)
        return await targets(receiver, *args)

    monkeypatch.setattr(OfferReceiver, "_targets", cancelled)
    with pytest.raises(asyncio.CancelledError):
        await accepting
    assert ground.budget.used_bytes == 0
