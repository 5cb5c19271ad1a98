"""Entries and values on a GPU, for peers of the host that cannot reach it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote import connect
from asynckv.buffers.serve import serve
from asynckv.buffers.serve_store import StoreService
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import (
    AsyncKVError,
    ChecksumError,
    EntryTooLarge,
    GPUFailed,
    LeaseLost,
)
from asynckv.links import sharing
from asynckv.links.dial import dial
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.sharing import MapHolder, Pin
from asynckv.protocol.frames import Failure, Get, Nack
from asynckv.protocol.map_frames import OpenStoreMap
from asynckv.protocol.payload_frames import Grant
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.slab_regions import SlabRegion
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import is_same, only
from asynckv.testing.fake_devices import fake_device_of
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.gpu_pairs import GpuPair, open_gpu_pair
from asynckv.testing.gpu_stores import GpuStores, open_gpu_stores
from asynckv.testing.link_pairs import Hearer, name_of
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.testing.raw_maps import RawMapper

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="nothing to map here")


@pytest.fixture
async def pair(gpus: FakeGpus) -> AsyncIterator[GpuPair]:
    """A buffer on a GPU, and a peer that has none."""
    async with open_gpu_pair(gpus, device=None) as pair:
        yield pair


@pytest.fixture
async def apart(two_gpus: FakeGpus) -> AsyncIterator[GpuPair]:
    """A peer on another GPU, and no NCCL."""
    async with open_gpu_pair(two_gpus, theirs=1, url="?payload=map") as pair:
        yield pair


@pytest.fixture
async def stores(gpus: FakeGpus) -> AsyncIterator[GpuStores]:
    """A store on a GPU, and a peer that has none."""
    async with open_gpu_stores(gpus, device=None) as pair:
        yield pair


async def fill(buffer: LookupBuffer, seed: int = 1) -> None:
    """Insert a large tensor and a small one."""
    await buffer.insert([1], None, noise(MIB, seed), None, noise(8))


def spoil(pair: GpuPair) -> None:
    """Change a byte in the middle of what lies on the GPU."""
    (entry,) = pair.buffer.ledger.book.entries.values()
    part = next(part for part in entry.parts if part.name == "key")
    assert part.region is not None
    place = part.region.place(part.spec)
    assert isinstance(place, DeviceMemory)
    pair.ours.process.cuda.view(place)[MIB // 2] ^= 1


async def test_who_has_no_gpu_reads_a_copy_where_it_lies(
    gpus: FakeGpus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "asynckv.buffers.mapped")
    async with open_gpu_pair(gpus, device=None) as pair:
        assert pair.peer.transport == "map"
        for seed in (1, 2):
            await fill(pair.buffer, seed)
            async with pair.peer.lookup.drop_select([1]) as entry:
                assert is_same(only(entry.key), noise(MIB, seed))
                assert is_same(entry.hidden, noise(8)) and not only(entry.key).is_cuda
                assert pair.staged_bytes == MIB + 8
                assert sum(pair.buffer.statistics().mapped_by.values()) == 2
                assert not pair.peer.budget.used_bytes
            del entry
            await until(lambda: not pair.staged_bytes)
    said = [r for r in caplog.records if "read in its memory of the host" in r.message]
    assert len(said) == 1


async def test_a_plain_await_has_memory_of_its_own(pair: GpuPair) -> None:
    await fill(pair.buffer)
    entry = await pair.peer.lookup.drop_select([1])
    await until(lambda: not pair.staged_bytes)
    assert is_same(only(entry.key), noise(MIB, 1)) and is_same(entry.hidden, noise(8))
    assert not pair.buffer.statistics().used_bytes


async def test_it_lands_where_the_caller_wants_it(pair: GpuPair) -> None:
    into = {"key": torch.zeros(MIB, dtype=torch.uint8)}
    for how in ("await", "enter"):
        await fill(pair.buffer)
        into["key"].zero_()
        selecting = pair.peer.lookup.drop_select([1], into=into)
        if how == "await":
            assert (await selecting).key is into["key"]
        else:
            async with selecting as entry:
                assert entry.key is into["key"]
            del entry
        assert is_same(into["key"], noise(MIB, 1))
    await until(lambda: not pair.staged_bytes)


async def test_who_is_on_another_gpu_has_it_there(apart: GpuPair) -> None:
    assert apart.peer.transport == "map"
    into = {"key": apart.theirs.tensor(torch.zeros(MIB, dtype=torch.uint8))}
    for targets in (None, into):
        await fill(apart.buffer)
        async with apart.peer.lookup.drop_select([1], into=targets) as entry:
            assert str(only(entry.key).device) == "cuda:1"
            assert is_same(only(entry.key), noise(MIB, 1))
            assert is_same(entry.hidden, noise(8))
        del entry
    await until(lambda: not apart.staged_bytes)


async def test_views_outlive_the_entry_and_the_link(pair: GpuPair) -> None:
    await fill(pair.buffer)
    views = list[torch.Tensor]()
    with pytest.raises(LeaseLost):
        async with pair.peer.lookup.drop_select([1]) as entry:
            views.append(only(entry.key))
            del entry
            pair.peer.abort()
    await until(lambda: not pair.buffer.statistics().leased)
    await pair.buffer.withdraw(next(iter(pair.buffer.ledger.book.entries)))
    assert pair.staged_bytes >= MIB and is_same(views[0], noise(MIB, 1))
    views.clear()
    await until(lambda: not pair.staged_bytes)


async def test_a_peer_that_keeps_its_views_gets_the_rest_by_lanes(
    gpus: FakeGpus,
) -> None:
    async with open_gpu_pair(gpus, device=None, buffer_bytes=3 * MIB) as pair:
        views = list[torch.Tensor]()
        for seed in range(4):
            await pair.buffer.insert([seed], None, noise(MIB, seed), None, None)
            async with pair.peer.lookup.drop_select([seed]) as entry:
                views.append(only(entry.key))
            del entry
            assert pair.staged_bytes == min(seed + 1, 3) * MIB
        assert all(is_same(view, noise(MIB, n)) for n, view in enumerate(views))
        views.clear()
        await until(lambda: not pair.staged_bytes)


async def test_a_stream_from_a_gpu_comes_by_lanes(pair: GpuPair) -> None:
    await fill(pair.buffer)
    async with pair.peer.lookup.open_drop_select([1]) as stream:
        assert is_same(await stream.wait_for("key"), noise(MIB, 1))
        assert not pair.staged_bytes


async def test_what_is_on_the_host_rides_along(pair: GpuPair) -> None:
    key = pair.buffer.empty((MIB,), torch.uint8)
    key.copy_(pair.ours.tensor(noise(MIB, 3)))
    await pair.buffer.insert([1], None, key, None, noise(8))
    (stored,) = pair.buffer.ledger.book.entries.values()
    on_gpu = [region.is_on_device for region in stored.regions[:2]]
    del key, stored
    async with pair.peer.lookup.drop_select([1]) as entry:
        assert on_gpu == [True, False] and pair.staged_bytes == MIB
        assert is_same(only(entry.key), noise(MIB, 3))
        assert is_same(entry.hidden, noise(8))
    del entry


async def test_memory_that_is_filled_anew_is_no_changed_entry(gpus: FakeGpus) -> None:
    async with (
        open_gpu_pair(gpus) as pair,
        connect(pair.server.url, max_bytes="16MiB") as host,
    ):
        key = pair.buffer.empty((MIB,), torch.uint8)
        for seed, peer in ((1, host), (2, pair.peer)):
            with torch.inference_mode():
                key.copy_(noise(MIB, seed))
            await pair.buffer.insert([1], None, key, None, None)
            entry = await peer.lookup.drop_select([1])
            assert is_same(only(entry.key), noise(MIB, seed))
            del entry
            await until(lambda: not pair.buffer.statistics().used_bytes)
        assert (host.transport, pair.peer.transport) == ("map", "cuda_ipc")
        del key


async def test_bytes_that_changed_on_the_gpu_are_refused(
    caplog: pytest.LogCaptureFixture, pair: GpuPair
) -> None:
    await fill(pair.buffer)
    spoil(pair)
    with pytest.raises(ChecksumError):
        await pair.peer.lookup.drop_select([1])
    assert not pair.staged_bytes and not pair.buffer.statistics().leased
    caplog.clear()


async def test_bytes_that_changed_in_the_copy_are_refused(
    monkeypatch: pytest.MonkeyPatch, pair: GpuPair
) -> None:
    await fill(pair.buffer)
    pin = MapHolder.pin

    def spoil_and_pin(holder: MapHolder, regions: Sequence[SlabRegion]) -> Pin:
        regions[0].view()[0] ^= 1
        return pin(holder, regions)

    with monkeypatch.context() as patch:
        patch.setattr(MapHolder, "pin", spoil_and_pin)
        with pytest.raises(ChecksumError):
            await pair.peer.lookup.drop_select([1])
    await until(lambda: not pair.staged_bytes)
    assert is_same(only((await pair.peer.lookup.drop_select([1])).key), noise(MIB, 1))


@pytest.mark.parametrize("digest", ["full", "off"])
async def test_a_copy_has_whatever_digest_was_asked_for(
    gpus: FakeGpus, digest: str
) -> None:
    async with open_gpu_pair(gpus, device=None, digest=digest) as pair:
        await fill(pair.buffer)
        entry = await pair.peer.lookup.drop_select([1])
        assert is_same(only(entry.key), noise(MIB, 1))


async def test_who_waits_for_a_copy_that_its_gpu_refuses_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pair: GpuPair
) -> None:
    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    await fill(pair.buffer)
    with monkeypatch.context() as patch:
        patch.setattr(pair.ours.process.cuda, "copy", fail)
        with pytest.raises(GPUFailed, match="off the bus"):
            await pair.peer.lookup.drop_select([1])
    caplog.clear()
    assert is_same((await pair.peer.lookup.drop_select([1])).hidden, noise(8))


@pytest.mark.parametrize("by_view", [True, False])
async def test_a_cancelled_select_leaves_no_copy(pair: GpuPair, by_view: bool) -> None:
    buffer = pair.buffer

    async def select() -> bool:
        selecting = pair.peer.lookup.drop_select([1])
        if not by_view:
            return is_same(only((await selecting).key), noise(MIB, 1))
        async with selecting as entry:
            return is_same(only(entry.key), noise(MIB, 1))

    async def check(k: int, mode: CancelMode, outcome: Outcome[bool]) -> None:
        if outcome.cancelled and await pair.peer.lookup.peek([1]):
            assert is_same((await pair.peer.lookup.drop_select([1])).hidden, noise(8))
        assert outcome.cancelled or outcome.value
        await until(lambda: not buffer.statistics().used_bytes)
        await until(lambda: not pair.staged_bytes)

    await sweep_cancellation(select, check, before=lambda: fill(buffer))


async def test_a_link_that_is_lost_while_it_is_copied_leaves_nothing(
    gpus: FakeGpus,
) -> None:
    async with open_gpu_pair(gpus, device=None, reconnect_s=0) as pair:
        await fill(pair.buffer)
        (services,) = pair.server._services
        assert services.lookup is not None
        async with services.lookup.staging._turn:
            selecting = asyncio.create_task(pair.peer.lookup.drop_select([1]))
            await until(lambda: bool(pair.buffer.statistics().leased))
            await until_blocked(selecting)
            pair.peer.abort()
            await until(lambda: not pair.buffer.statistics().leased)
        await asyncio.wait({selecting})
        assert selecting.exception() is not None
        await until(lambda: services.has_ended)
        assert not pair.staged_bytes


async def test_a_peer_that_leaves_its_mapping_meanwhile_gets_it_by_lanes(
    monkeypatch: pytest.MonkeyPatch, pair: GpuPair
) -> None:
    await fill(pair.buffer)
    (services,) = pair.server._services
    assert services.lookup is not None
    async with services.lookup.staging._turn:
        selecting = asyncio.create_task(pair.peer.lookup.drop_select([1]))
        await until(lambda: bool(pair.buffer.statistics().leased))
        await until_blocked(selecting)
        monkeypatch.setattr(sharing, "MAX_PINS", 0)
    assert is_same(only((await selecting).key), noise(MIB, 1))
    await until(lambda: not pair.staged_bytes)


async def test_an_offer_that_is_too_long_leaves_no_copy(
    monkeypatch: pytest.MonkeyPatch, pair: GpuPair
) -> None:
    def refuse(max_body_bytes: int, body: bytes) -> None:
        raise EntryTooLarge(nbytes=len(body), max_bytes=max_body_bytes)

    await fill(pair.buffer)
    with monkeypatch.context() as patch:
        patch.setattr("asynckv.buffers.serve_offer.check_body", refuse)
        with pytest.raises(EntryTooLarge):
            await pair.peer.lookup.drop_select([1])
    await until(lambda: not pair.staged_bytes)
    assert not pair.buffer.mapped_by


@pytest.mark.parametrize("whose", ["sharing.MapHolder.pin", "check_body"])
async def test_an_offer_that_fails_in_any_way_is_told_and_leaves_no_copy(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pair: GpuPair,
    whose: str,
) -> None:
    def fail(*anything: object) -> None:
        raise MemoryError("no room to offer it")

    where = "links" if "." in whose else "buffers.serve_offer"
    await fill(pair.buffer)
    with monkeypatch.context() as patch:
        patch.setattr(f"asynckv.{where}.{whose}", fail)
        async with asyncio.timeout(5):
            with pytest.raises(AsyncKVError):
                await pair.peer.lookup.drop_select([1])
    assert not pair.staged_bytes and not pair.buffer.mapped_by
    caplog.clear()
    assert is_same((await pair.peer.lookup.drop_select([1])).hidden, noise(8))


async def test_a_value_is_read_in_a_copy(stores: GpuStores) -> None:
    assert stores.peer.transport == "map"
    await stores.store.put("key", noise(MIB))
    value = await stores.peer.store.get("key")
    assert is_same(value, noise(MIB)) and not stores.peer.budget.used_bytes
    await until(lambda: not stores.staged_bytes)
    into = torch.zeros(MIB, dtype=torch.uint8)
    assert await stores.peer.store.get("key", into=into) is into
    assert is_same(into, noise(MIB))
    await until(lambda: not stores.staged_bytes)


async def test_a_value_that_finds_no_room_comes_by_lanes(stores: GpuStores) -> None:
    assert stores.store.stage is not None
    await stores.store.put("key", noise(MIB))
    held = await stores.store.stage.take([16 * MIB])
    assert held is not None
    assert is_same(await stores.peer.store.get("key"), noise(MIB))
    held[0].release()


@contextlib.asynccontextmanager
async def getting_in_turn(
    stores: GpuStores,
) -> AsyncIterator[tuple[StoreService, asyncio.Task[torch.Tensor | None]]]:
    """Get a value, whose copy waits for its turn until this is left."""
    await stores.store.put("key", noise(MIB))
    (services,) = stores.server._services
    serving = services.store
    assert serving is not None
    async with serving.staging._turn:
        getting = asyncio.create_task(stores.peer.store.get("key"))
        await until(lambda: bool(serving.under_way))
        await until_blocked(getting)
        yield serving, getting


async def test_a_value_whose_peer_has_left_its_mapping_comes_by_lanes(
    monkeypatch: pytest.MonkeyPatch, stores: GpuStores
) -> None:
    async with getting_in_turn(stores) as (_, getting):
        monkeypatch.setattr(sharing, "MAX_PINS", 0)
    assert is_same(await getting, noise(MIB))
    assert is_same(await stores.peer.store.get("key"), noise(MIB))
    assert not stores.staged_bytes


async def test_a_copy_is_shown_to_whom_it_was_made_for(
    monkeypatch: pytest.MonkeyPatch, stores: GpuStores
) -> None:
    (services,) = stores.server._services
    async with getting_in_turn(stores) as (serving, getting):
        monkeypatch.setattr(serving.hoisting, "hoist", None)
        serving.showing.holder = None  # it may be another one by then
    assert is_same(await getting, noise(MIB))
    assert not stores.peer.budget.used_bytes and not services.devices.copies.used_bytes
    await until(lambda: not stores.staged_bytes)


@pytest.mark.parametrize("url", ["", "?payload=inline"])
async def test_a_cancelled_get_leaves_no_copy(gpus: FakeGpus, url: str) -> None:
    into = torch.zeros(MIB, dtype=torch.uint8)
    async with open_gpu_stores(gpus, device=None, url=url) as pair:
        store = pair.peer.store
        await pair.store.put("key", noise(MIB))
        (services,) = pair.server._services

        async def check(k: int, mode: CancelMode, outcome: Outcome[object]) -> None:
            into.fill_(7)
            await until(lambda: not pair.staged_bytes)
            await until(lambda: not services.devices.copies.used_bytes)
            assert pair.store.statistics().used_bytes == MIB and into.eq(7).all()

        await sweep_cancellation(lambda: store.get("key", into=into), check)
        assert is_same(await store.get("key"), noise(MIB))


async def test_who_grants_before_anything_is_offered_has_broken_the_link(
    stores: GpuStores,
) -> None:
    await stores.store.put("key", noise(MIB))
    (services,) = stores.server._services
    link, hearer = stores.peer._linked(), Hearer()
    assert services.store is not None
    async with services.store.staging._turn:
        stream = link.open_stream(hearer, Get("key"))
        stream.send(Grant(1))
        assert "Grant" in str(await hearer.loss())
    await until(lambda: services.has_ended)
    assert not stores.staged_bytes


async def test_values_in_memory_of_the_host_are_not_mapped() -> None:
    async with (
        StoreBuffer("1MiB") as store,
        serve("tcp://127.0.0.1:0", store=store) as server,
    ):
        link, hearer = await dial(server.url, identity=name_of("peer")), Hearer()
        link.open_stream(hearer, OpenStoreMap())
        frame, _ = await hearer.next()
        assert isinstance(frame, Failure) and "not mapped" in frame.message
        await link.aclose()


async def test_a_raw_peer_holds_no_more_than_it_says(gpus: FakeGpus) -> None:
    async with open_gpu_pair(gpus, device=None) as pair:
        await fill(pair.buffer)
        mapper = RawMapper(await dial(pair.server.url, identity=name_of("raw")))
        await mapper.map()
        _, stream, offer, _ = await mapper.select()
        assert offer.mapped is not None and pair.staged_bytes == MIB + 8
        stream.send(Nack(offer.token))
        await until(lambda: not pair.buffer.statistics().leased)
        assert pair.staged_bytes == MIB + 8
        mapper.release(offer.mapped.pin)
        await until(lambda: not pair.staged_bytes)
        await mapper.aclose()


async def test_a_store_on_the_gpu_keeps_entries_of_the_host_from_nobody(
    gpus: FakeGpus,
) -> None:
    here, there = (fake_device_of(gpus.process()).device for _ in range(2))
    async with (
        LookupBuffer("4MiB", drain_s=0) as lookup,
        StoreBuffer("4MiB", device=here) as store,
        serve("tcp://127.0.0.1:0", lookup=lookup, store=store) as server,
        connect(server.url, device=there, max_bytes="8MiB") as peer,
    ):
        assert peer.transport == "map" and not peer.lookup.shows_gpu_memory
        await fill(lookup)
        async with peer.lookup.drop_select([1]) as entry:
            assert is_same(only(entry.key), noise(MIB, 1)) and only(entry.key).is_cuda
        await store.put("key", noise(MIB))
        value = await peer.store.get("key")
        assert is_same(value, noise(MIB)) and only(value).is_cuda
        await until(lambda: not store.sharing.mapped_by)


async def test_a_store_on_another_gpu_is_mapped_beside_entries_on_the_peers_own(
    two_gpus: FakeGpus,
) -> None:
    process = two_gpus.process()
    here, beside = (fake_device_of(process, index).device for index in (0, 1))
    there = fake_device_of(two_gpus.process()).device
    async with (
        LookupBuffer("4MiB", device=here, drain_s=0) as lookup,
        StoreBuffer("4MiB", device=beside) as store,
        serve("tcp://127.0.0.1:0", lookup=lookup, store=store) as server,
        connect(server.url, device=there, max_bytes="8MiB") as peer,
    ):
        assert peer.transport == "cuda_ipc" and peer.lookup.shows_gpu_memory
        (services,) = server._services
        assert services.link.transport_name == "cuda_ipc"
        await store.put("key", noise(MIB))
        value = await peer.store.get("key")
        assert is_same(value, noise(MIB)) and str(only(value).device) == "cuda:0"
        assert not store.sharing.mapped_by


async def test_buffers_on_two_gpus_are_both_mapped(two_gpus: FakeGpus) -> None:
    process = two_gpus.process()
    here, beside = (fake_device_of(process, index).device for index in (0, 1))
    async with (
        LookupBuffer("4MiB", device=here, drain_s=0) as lookup,
        StoreBuffer("4MiB", device=beside) as store,
        serve("tcp://127.0.0.1:0", lookup=lookup, store=store) as server,
        connect(server.url, max_bytes="8MiB") as peer,
    ):
        await fill(lookup)
        await store.put("key", noise(MIB))
        assert is_same(only((await peer.lookup.drop_select([1])).key), noise(MIB, 1))
        assert is_same(await peer.store.get("key"), noise(MIB))
