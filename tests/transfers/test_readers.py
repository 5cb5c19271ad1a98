"""Reading what a peer says lies in its memory, also where that is not so."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import torch

from asynckv.abc import KVEntry
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import Server, serve
from asynckv.buffers.serving import select as offer_module
from asynckv.buffers.serving.select import ServedSelect
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import (
    ChecksumError,
    EntryTooLarge,
    IncompatiblePeer,
    PeerLost,
)
from asynckv.links.options import Digest
from asynckv.protocol.values import Place
from asynckv.tensors import shared_file
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.shared_file import edges_of
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import noise
from asynckv.transfers import readers
from harness.fake_devices import FakeDevice, fake_device_of
from harness.fake_gpus import FakeGpus

KIB, MIB = 2**10, 2**20


@pytest.fixture
async def peer(mappable: Server) -> AsyncIterator[Peer]:
    async with connect(mappable.url, max_bytes="16MiB", reconnect_s=0) as peer:
        assert peer.transport == "map"
        yield peer


async def insert(buffer: LookupBuffer, value: int = 1, nbytes: int = MIB) -> str:
    tensor = torch.full((nbytes,), value, dtype=torch.uint8)
    return await buffer.insert([1, 2], None, tensor, None, None)


def spoil(buffer: LookupBuffer, offset: int) -> None:
    """Change a byte of the one entry."""
    (entry,) = buffer.ledger.table.entries.values()
    region = entry.parts[0].region
    assert region is not None
    region.view()[offset : offset + 1] = b"\xff"


@pytest.mark.parametrize(
    "place",
    [
        Place(((8 * MIB, MIB),), 0, 1),
        Place(((2**50, MIB),), 0, 1),
        Place(((0, 4096),), 0, 1),
        Place((), 0, 1),
        Place(((0, 2 * MIB),), 7, 1),
    ],
)
async def test_what_lies_elsewhere_than_in_the_file_breaks_the_link(
    monkeypatch: pytest.MonkeyPatch, local: LookupBuffer, peer: Peer, place: Place
) -> None:
    monkeypatch.setattr(offer_module, "place_of", lambda region: place)
    monkeypatch.setattr(shared_file, "edges_of", lambda *args: b"")
    await insert(local)
    with pytest.raises(PeerLost, match="an offer of"):
        await peer.lookup.drop_select()
    await until(lambda: not local.statistics().mapped_by)


@pytest.mark.parametrize(
    "lie", [lambda some: [*some, None], lambda some: [], lambda some: ["x"]]
)
async def test_places_that_are_no_places_break_the_link(
    monkeypatch: pytest.MonkeyPatch,
    local: LookupBuffer,
    peer: Peer,
    lie: Callable[[Sequence[Place]], list[object]],
) -> None:
    class Liar:
        def encode(self, places: Sequence[Place]) -> bytes:
            return encoder.encode(lie(places))

    encoder = offer_module._encoder
    monkeypatch.setattr(offer_module, "_encoder", Liar())
    await insert(local)
    with pytest.raises(PeerLost, match="places"):
        await peer.lookup.drop_select()


async def test_a_pin_that_was_used_before_breaks_the_link(
    monkeypatch: pytest.MonkeyPatch, local: LookupBuffer, mappable: Server, peer: Peer
) -> None:
    await insert(local)
    await peer.lookup.drop_select()
    await until(lambda: not local.statistics().mapped_by)
    (services,) = mappable._services
    assert services.lookup is not None and services.lookup.export.importer is not None
    services.lookup.export.importer._last_number = 0
    await insert(local)
    with pytest.raises(PeerLost, match="pin 1 after pin 1"):
        await peer.lookup.drop_select()


async def test_mapped_memory_is_no_offer_where_nothing_is_mapped(
    local: LookupBuffer, mappable: Server, peer: Peer
) -> None:
    (services,) = mappable._services
    assert services.lookup is not None
    importer = services.lookup.export.importer
    async with connect(f"{mappable.url}?payload=inline", reconnect_s=0) as other:
        (far,) = mappable._services - {services}
        assert far.lookup is not None
        far.lookup.export.importer = importer
        await insert(local)
        with pytest.raises(PeerLost, match="not mapped"):
            await other.lookup.drop_select()


@pytest.mark.parametrize("offset", [0, 4095, MIB - 4096, MIB - 1])
@pytest.mark.parametrize("how", ["await", "enter"])
async def test_edges_that_were_changed_after_the_offer_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    local: LookupBuffer,
    peer: Peer,
    offset: int,
    how: str,
) -> None:
    def edges_before(
        memory: Any, places: Sequence[Place], sizes: Sequence[int]
    ) -> bytes:
        edges = edges_of(memory, places, sizes)
        spoil(local, offset)
        return edges

    monkeypatch.setattr(shared_file, "edges_of", edges_before)
    await insert(local)
    with pytest.raises(ChecksumError):
        if how == "await":
            await peer.lookup.drop_select()
        else:
            async with peer.lookup.drop_select():
                raise AssertionError
    await until(lambda: not local.statistics().mapped_by)
    assert local.statistics().entries == 1


@pytest.mark.parametrize("how", ["await", "enter", "into"])
async def test_full_digests_see_every_byte(
    local: LookupBuffer, mappable: Server, how: str
) -> None:
    async with connect(mappable.url, digest="full") as peer:
        await insert(local)
        spoil(local, MIB // 2)
        into = {"key": torch.empty(MIB, dtype=torch.uint8)} if how == "into" else None
        with pytest.raises(ChecksumError):
            if how == "await":
                await peer.lookup.drop_select()
            else:
                async with peer.lookup.drop_select(into=into):
                    raise AssertionError
        await until(lambda: not local.statistics().mapped_by)


async def test_whoever_keeps_the_error_of_other_bytes_keeps_no_view(
    local: LookupBuffer, mappable: Server
) -> None:
    async with connect(mappable.url, digest="full") as peer:
        await insert(local)
        spoil(local, MIB // 2)
        with pytest.raises(ChecksumError) as kept:
            async with peer.lookup.drop_select():
                raise AssertionError
        await until(lambda: not local.statistics().mapped_by)
        assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("digest", ["edges", "full"])
@pytest.mark.parametrize("how", ["await", "enter", "refused", "into"])
async def test_pages_that_lie_apart_are_one_tensor(
    monkeypatch: pytest.MonkeyPatch, mappable: Server, how: str, digest: str
) -> None:
    local = mappable._lookup
    assert local is not None
    ids = [await insert(local, 1, MIB) for _ in range(7)]
    for entry_id in ids[::2]:
        await local.withdraw(entry_id)
    values = torch.randint(0, 256, (3 * MIB,), dtype=torch.uint8)
    entry_id = await local.insert([7], None, values, None, None)
    region = local.ledger.table.entries[entry_id].regions[0]
    assert region.pages is not None and len(region.pages.runs) > 1
    del region
    if how == "refused":
        monkeypatch.setattr(shared_file, "stitch", _refuse)
    async with connect(mappable.url, digest=digest) as peer:  # type: ignore[arg-type]
        if how == "await":
            entry = await peer.lookup.drop_select([7])
        else:
            into = {"key": torch.zeros_like(values)} if how == "into" else None
            async with peer.lookup.drop_select([7], into=into) as entry:
                pass
        assert isinstance(entry.key, torch.Tensor)
        assert torch.equal(entry.key, values)
        del entry


async def test_pages_that_lie_apart_and_blocks_are_verified_each_as_one_tensor(
    local: LookupBuffer, mappable: Server
) -> None:
    ids = [await insert(local) for _ in range(7)]
    for entry_id in ids[:5:2]:
        await local.withdraw(entry_id)
    key, blocks = noise(2 * MIB), noise(MIB, seed=1).view(4, -1)
    entry_id = await local.insert([7], None, key, blocks, None)
    pages = local.ledger.table.entries[entry_id].regions[0].pages
    assert pages is not None and len(pages.runs) == 2
    del pages
    found, pool = torch.zeros_like(key), torch.zeros_like(blocks)
    async with connect(mappable.url, digest="full") as peer:
        where = KVBlocks(pool, [3, 1, 0, 2])
        await peer.lookup.drop_select([7], into={"key": found, "value": where})
    assert torch.equal(found, key) and torch.equal(pool[[3, 1, 0, 2]], blocks)


async def test_many_tensors_are_read_in_steps_of_the_loop(
    monkeypatch: pytest.MonkeyPatch, local: LookupBuffer, peer: Peer
) -> None:
    add, steps = readers._Job.add, [0]

    def count(job: Any, *args: Any) -> None:
        steps[-1] += 1
        add(job, *args)

    monkeypatch.setattr(readers._Job, "add", count)
    layers = {
        str(number): torch.full((MIB // 16,), float(number)) for number in range(24)
    }
    await local.insert([1], None, layers, None, None)
    taking = asyncio.create_task(peer.lookup.drop_select())
    while not taking.done():
        await asyncio.sleep(0)
        steps.append(0)
    assert max(steps) <= 16 and sum(steps) == len(layers)
    key = (await taking).key
    assert isinstance(key, dict)
    assert all(torch.equal(key[name], layers[name]) for name in layers)


async def test_what_rides_along_lands_in_memory_of_the_caller(
    local: LookupBuffer, peer: Peer
) -> None:
    await insert(local)  # the first slab
    await local.drop_select()
    key = local.empty((MIB,), torch.uint8).fill_(3)
    hidden = torch.arange(100)
    await local.insert([1], None, key, None, hidden)
    del key
    into = {
        "key": torch.zeros(MIB, dtype=torch.uint8),
        "hidden": torch.zeros_like(hidden),
    }
    entry = await peer.lookup.drop_select(into=into)
    assert entry.hidden is into["hidden"] and torch.equal(into["hidden"], hidden)
    assert entry.key is into["key"] and into["key"].eq(3).all()


@pytest.mark.parametrize("how", ["lost", "retracted"])
async def test_an_offer_that_ends_before_there_was_room_lands_nowhere_and_costs_none(
    local: LookupBuffer, mappable: Server, peer: Peer, how: str
) -> None:
    budget, into = peer.budget, torch.zeros(MIB, dtype=torch.uint8)
    both = torch.ones(2, MIB, dtype=torch.uint8)
    await budget.reserve(budget.max_bytes)
    await local.insert([1], None, both[0], both[1], None)
    taking = asyncio.create_task(peer.lookup.drop_select(into={"key": into}))
    await until(lambda: bool(budget._line))
    (services,) = mappable._services
    assert services.lookup is not None
    (served,) = services.lookup.selects
    if how == "lost":
        services.link.abort()
        await until(lambda: not peer.is_connected)
    else:
        assert isinstance(served, ServedSelect) and served._offering is not None
        served._offering.retract()
        await until_blocked(taking)
    budget.release(budget.max_bytes)
    await until_blocked(taking)
    assert budget.used_bytes == 0 and not into.any()
    taking.cancel()
    with pytest.raises(PeerLost if how == "lost" else asyncio.CancelledError):
        await taking
    await until(lambda: not local.statistics().mapped_by)
    assert local.statistics().entries == 1


async def test_what_cannot_be_mapped_again_is_received_and_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    local: LookupBuffer,
    peer: Peer,
) -> None:
    await insert(local)
    with pytest.raises(KeyError):
        async with peer.lookup.drop_select() as entry:
            raise KeyError
    with monkeypatch.context() as patch:
        patch.setattr(shared_file, "stitch", _refuse)
        assert (await peer.lookup.drop_select()).key_tensor.eq(1).all()
    assert "cannot be mapped again: " in caplog.text
    del entry
    await until(lambda: not local.statistics().mapped_by)
    assert peer.transport == "map"


async def test_a_second_view_needs_no_descriptors(
    local: LookupBuffer, peer: Peer
) -> None:
    await insert(local)
    with pytest.raises(KeyError):
        async with peer.lookup.drop_select() as entry:
            view = entry.key_tensor.fill_(2)
            raise KeyError
    _, most = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    try:
        async with peer.lookup.drop_select() as entry:
            assert entry.key_tensor.eq(1).all()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert view.eq(2).all()


def _refuse(*args: object, **kwargs: object) -> None:
    raise OSError("too many mappings")


@pytest.mark.parametrize("digest", ["full", "edges", "off"])
@pytest.mark.parametrize("nbytes", [KIB, 16 * KIB])
async def test_blocks_land_where_the_caller_wants_them(
    local: LookupBuffer, mappable: Server, digest: Digest, nbytes: int
) -> None:
    tensor = (torch.arange(96 * nbytes) % 251).to(torch.uint8).view(96, nbytes)
    await local.insert([1, 2], None, tensor, None, None)
    pool = torch.zeros((200, nbytes), dtype=torch.uint8)
    ids = [*range(7, 200, 2)][:96]
    async with connect(mappable.url, digest=digest) as peer:
        assert peer.transport == "map"
        await peer.lookup.drop_select(into={"key": KVBlocks(pool, ids)})
    assert torch.equal(pool[ids], tensor)
    assert int(pool.count_nonzero()) == int(tensor.count_nonzero())


async def fill(buffer: LookupBuffer) -> None:
    """Insert a large tensor and a small one."""
    await buffer.insert([1], None, noise(MIB), None, noise(8))


async def test_who_is_on_a_gpu_of_the_host_reads_mapped_memory(
    local: LookupBuffer, on_gpu: tuple[FakeDevice, Peer]
) -> None:
    await fill(local)
    _, peer = on_gpu
    entry = await peer.lookup.drop_select([1])
    assert peer.transport == "map"
    assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
    assert is_same(entry.key, noise(MIB)) and is_same(entry.hidden, noise(8))
    await until(lambda: not local.statistics().pinned_bytes)


async def test_what_is_mapped_lands_at_the_callers_places(
    local: LookupBuffer, on_gpu: tuple[FakeDevice, Peer]
) -> None:
    gpu, peer = on_gpu
    await fill(local)
    into = {"key": gpu.tensor(noise(MIB, 2)), "hidden": noise(8, 2)}
    async with peer.lookup.drop_select([1], into=into) as entry:
        assert entry.key is into["key"] and is_same(into["key"], noise(MIB))
        assert entry.hidden is into["hidden"] and is_same(into["hidden"], noise(8))
        await until(lambda: not local.statistics().pinned_bytes)


async def test_what_is_mapped_and_larger_than_the_gpus_bound_is_refused(
    gpus: FakeGpus, local: LookupBuffer
) -> None:
    await fill(local)
    device = fake_device_of(gpus.process()).device
    async with (
        serve("tcp://127.0.0.1:0", lookup=local) as server,
        connect(server.url, device=device, max_bytes=MIB) as peer,
    ):
        with pytest.raises(EntryTooLarge):
            await peer.lookup.drop_select([1])
        assert peer.transport == "map"


async def test_a_cancelled_select_of_mapped_memory_leaves_nothing_in_use(
    local: LookupBuffer, on_gpu: tuple[FakeDevice, Peer]
) -> None:
    _, peer = on_gpu

    async def check(k: int, mode: CancelMode, outcome: Outcome[KVEntry]) -> None:
        await until(lambda: not peer.budget.used_bytes)
        if not await peer.lookup.peek([1]):
            return
        entry = await peer.lookup.drop_select([1])
        assert is_same(entry.hidden, noise(8))

    select = peer.lookup.drop_select
    await sweep_cancellation(lambda: select([1]), check, before=lambda: fill(local))
    await until(lambda: not local.statistics().pinned_bytes)


async def test_a_mapping_that_is_asked_for_and_is_not_there_is_an_error() -> None:
    gpus = FakeGpus()
    theirs = fake_device_of(gpus.process()).device
    async with (
        StoreBuffer("1MiB") as store,
        serve("tcp://127.0.0.1:0", store=store) as server,
    ):
        with pytest.raises(IncompatiblePeer, match="cannot be mapped"):
            url = f"{server.url}?payload=map"
            async with connect(url, max_bytes="1MiB", device=theirs):
                raise AssertionError
    gpus.close()
