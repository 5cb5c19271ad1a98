"""What is saved to a store leaves the GPU where it was computed, where it can."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from asynckv import connect
from asynckv.buffers.remote import Peer
from asynckv.buffers.remote_store import RemoteStoreBuffer
from asynckv.connectors import store_saving
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.keys import rank_block_keys
from asynckv.connectors.spool import Spool
from asynckv.connectors.store_orders import StoreMetadata, StoreOrder
from asynckv.connectors.store_shapes import namespace_of
from asynckv.connectors.store_worker import StoreWorker
from asynckv.errors import GPUFailed, PeerLost
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.cancellations.connectors.caches import ToyCaches
from asynckv.testing.cancellations.connectors.grounds import LARGE
from asynckv.testing.cancellations.connectors.store_grounds import (
    StoreGround,
    config_of,
    open_store_ground,
)
from asynckv.testing.engines.toy_model import ToyModel
from asynckv.testing.engines.toy_pairs import toy_shape
from asynckv.testing.expectations import expect_same
from asynckv.testing.fake_devices import stagings_of
from asynckv.testing.fake_gpus.gates import Gate
from asynckv.testing.shared_puts import SharedPuts

APART = pytest.mark.parametrize("are_apart", [False, True], ids=["one", "two"])
BLOCK_NBYTES = 64 + 2 * 2 * 16 * 4 * 96 * 4
BLOCKS = 3


@contextlib.asynccontextmanager
async def saving(
    are_apart: bool = False, model: ToyModel = LARGE, **options: Any
) -> AsyncIterator[StoreGround]:
    """Yield engines whose store was dialled: what is saved first does not wait."""
    places: Any = {"on_gpus": True, "are_apart": are_apart}
    async with open_store_ground("unix", model, **places, **options) as ground:
        yield ground


def peer_of(worker: StoreWorker) -> Peer:
    peer = worker._line._line._peer
    assert peer is not None
    return peer


def way_of(peer: Peer) -> str:
    """Return by which way something has gone from GPU to GPU, if it has."""
    if SharedPuts(peer).are_read:
        return "cuda_ipc" if SharedPuts(peer).has_shown else ""
    way = peer.ways.way(peer._linked())
    return "nccl" if way and way.transport.sender._sending._next > 0 else ""


def taken_on_gpu(ground: StoreGround) -> int:
    return SharedPuts(peer_of(ground.saver)).staged_bytes


@contextlib.contextmanager
def by_host() -> Iterator[list[int]]:
    """Yield the numbers of blocks that are gathered in host memory."""
    numbers, gather = list[int](), Spool.gather

    async def looking(spool: Spool, ids: Any, index: int, *args: Any) -> torch.Tensor:
        numbers.append(index)
        return await gather(spool, ids, index, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Spool, "gather", looking)
        yield numbers


@contextlib.contextmanager
def puts_held(at: int = 1) -> Iterator[asyncio.Event]:
    """Yield what lets puts from the GPU go on, from the one with that number on."""
    go_on, count, put = asyncio.Event(), [0], RemoteStoreBuffer.put_staged

    async def held(store: RemoteStoreBuffer, *args: Any) -> None:
        count[0] += 1
        if count[0] >= at:
            await go_on.wait()
        await put(store, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteStoreBuffer, "put_staged", held)
        yield go_on


async def begin(ground: StoreGround) -> tuple[str, ...]:
    """Begin to save a prompt, whose blocks are somebody else's then."""
    ground.begin_save(keys := ground.new_keys())
    async with asyncio.timeout(5):
        await ground.saver.wait_for_save()
    ground.saved.spoil()
    ground.saver.clear_connector_metadata()
    return keys


@APART
async def test_no_block_comes_to_the_host_on_its_way(are_apart: bool) -> None:
    async with saving(are_apart) as ground:
        with by_host() as numbers:
            await ground.save(keys := ground.new_keys())
        way = way_of(peer_of(ground.saver))
        assert not numbers and way == ("nccl" if are_apart else "cuda_ipc")
        await until(lambda: not taken_on_gpu(ground))
        await ground.load(keys)


async def test_the_first_ones_come_by_the_host_and_dial() -> None:
    with by_host() as numbers:
        async with saving() as ground:
            assert 0 in numbers and ground.saver.statistics().saved_blocks == BLOCKS


@contextlib.asynccontextmanager
async def given(
    ground: StoreGround, peer: Peer, buffer_device: str = "cuda"
) -> AsyncIterator[StoreGround]:
    """Yield the same, with an engine that was given the peer's store."""
    assert ground.gpu is not None
    gpu, shape = ground.gpu, toy_shape(LARGE)
    worker = StoreWorker(
        config_of(ground.url, buffer_device),
        KVEngine(engine_id="given", block_size=16, shape=shape),
        peer.store,
        stagings=stagings_of(gpu),
        device=gpu.device,
    )
    worker.register_kv_caches(ground.saved.layers)
    async with worker:
        await worker.start()
        yield dataclasses.replace(ground, saver=worker)


@APART
async def test_blocks_leave_for_a_store_that_was_given_as_well(are_apart: bool) -> None:
    async with saving(are_apart) as ground:
        assert ground.gpu is not None
        options: Any = {"fingerprint": "toy", "device": ground.gpu.device}
        async with connect(ground.url, max_bytes="2MiB", **options) as peer:
            await until(lambda: peer.ways.lead_to_store)
            async with given(ground, peer) as other:
                with by_host() as numbers:
                    await other.save(keys := other.new_keys())
                assert not numbers
                assert way_of(peer) == ("nccl" if are_apart else "cuda_ipc")
                await until(lambda: not SharedPuts(peer).staged_bytes)
                await ground.load(keys)
                await peer.aclose()
                with by_host() as numbers:
                    await begin(other)  # its puts fail, and no step does
                    await other.saver.flush()
                assert numbers and other.saver.statistics().unsaved_blocks == BLOCKS


async def test_a_store_whose_memory_is_elsewhere_is_put_to_by_the_host() -> None:
    async with saving() as ground, connect(ground.url, fingerprint="toy") as peer:
        async with given(ground, peer) as other:
            with by_host() as numbers:
                await other.save(keys := other.new_keys())
            assert sorted(numbers) == list(range(BLOCKS))
            await ground.load(keys)


@contextlib.asynccontextmanager
async def in_host_memory(ground: StoreGround) -> AsyncIterator[StoreGround]:
    """Yield the same, with engines whose caches are in host memory."""
    shape = toy_shape(LARGE)
    caches = [ToyCaches(LARGE, shape, 0, place) for place in (0, 1)]
    async with contextlib.AsyncExitStack() as stack:
        workers = []
        for number, one in enumerate(caches):
            engine = KVEngine(engine_id=f"host-{number}", block_size=16, shape=shape)
            worker = StoreWorker(config_of(ground.url), engine)
            worker.register_kv_caches(one.layers)
            workers.append(await stack.enter_async_context(worker))
        saver, loader = workers
        saved, loaded = caches
        there: Any = {"saver": saver, "loader": loader, "gpu": None}
        yield dataclasses.replace(ground, **there, saved=saved, loaded=loaded)


@APART
async def test_host_and_gpu_save_the_same_bytes_and_load_each_others(
    are_apart: bool,
) -> None:
    async with saving(are_apart) as ground, in_host_memory(ground) as host:
        await ground.save(ours := ground.new_keys())
        await host.save(theirs := ground.new_keys())
        for one, other in zip(named(ground, ours), named(host, theirs), strict=True):
            value, same = await ground.store.get(one), await ground.store.get(other)
            assert value is not None and same is not None
            expect_same(value, same.cpu())
            del value, same
        await host.load(ours)
        await ground.load(theirs)


def named(ground: StoreGround, keys: tuple[str, ...]) -> list[str]:
    return rank_block_keys(keys, namespace_of(ground.saver.engine), 0)


async def test_what_finds_no_room_leaves_by_the_host_at_once() -> None:
    async with saving(push_buffer_size=2 * BLOCK_NBYTES) as ground:
        with by_host() as numbers, puts_held() as go_on:
            keys = await begin(ground)
            assert numbers == [2]
            assert ground.saver._saving._leaving.used_bytes == 2 * BLOCK_NBYTES
            go_on.set()
        await ground.end_save(keys)
        await ground.load(keys)
        stats = ground.saver.statistics()
        assert stats.skipped_blocks == stats.unsaved_blocks == 0
        assert not ground.saver._saving._leaving.used_bytes


@APART
async def test_one_block_follows_another_through_the_same_memory(
    are_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with saving(are_apart, push_buffer_size=BLOCK_NBYTES) as ground:
        monkeypatch.setattr(store_saving, "_STAGED_BLOCKS", 1)
        monkeypatch.setattr(store_saving, "_STAGED_BYTES", 1)
        with by_host() as numbers:
            await ground.save(keys := ground.new_keys())
        assert not numbers and not ground.saver.statistics().skipped_blocks
        await ground.load(keys)


async def test_saves_leave_memory_for_loads() -> None:
    async with saving(push_buffer_size=BLOCK_NBYTES) as ground:
        with by_host() as numbers, puts_held() as go_on:
            keys = await begin(ground)
            assert numbers == [1, 2]
            memory = peer_of(ground.saver).on_gpu
            assert memory is not None and memory.device_pages is not None
            assert memory.device_pages.free_bytes >= 31 * BLOCK_NBYTES
            go_on.set()
        await ground.end_save(keys)


async def test_what_somebody_is_still_at_counts_though_it_was_released() -> None:
    async with saving(push_buffer_size=BLOCK_NBYTES) as ground:
        leaving = ground.saver._saving._leaving
        block = leaving.take(BLOCK_NBYTES)
        assert block is not None
        place = block.place()
        for _ in range(2):
            block.release()
        assert place.nbytes == BLOCK_NBYTES and not leaving.used_bytes
        assert leaving.take(BLOCK_NBYTES) is None
        del place
        await until(lambda: not block.is_at_work)
        again = leaving.take(BLOCK_NBYTES)
        assert again is not None
        again.release()


async def test_a_gpu_with_less_to_give_gives_less_to_saves() -> None:
    async with saving(push_buffer_size=32 * BLOCK_NBYTES) as ground:
        line, memory = ground.saver._line, peer_of(ground.saver).on_gpu
        assert line.leaving_bytes == 32 * BLOCK_NBYTES
        assert memory is not None and memory.device_pages is not None
        whole = memory.device_pages._allocator.pages
        memory.device_pages._allocator.pages = whole // 4
        assert 7 < line.leaving_bytes / BLOCK_NBYTES <= 8
        memory.device_pages._allocator.pages = whole


@pytest.mark.parametrize(("size", "is_told"), [(BLOCK_NBYTES - 1, True), (0, False)])
async def test_a_block_that_never_fits_leaves_by_the_host(
    caplog: pytest.LogCaptureFixture, size: int, is_told: bool
) -> None:
    async with saving(push_buffer_size=size) as ground:
        with by_host() as numbers:
            await ground.save(ground.new_keys())
        assert numbers == [0, 1, 2] and not ground.saver._line.leaving_bytes
    assert ("leave through host memory" in caplog.text) is is_told


async def test_small_blocks_leave_by_the_host() -> None:
    small = ToyModel(layers=2, head_dim=32)
    async with saving(model=small) as ground:
        with by_host() as numbers:
            await ground.save(ground.new_keys())
        assert numbers == [0, 1, 2] and not ground.saver._line.leaving_bytes


async def test_no_memory_is_taken_for_what_is_not_computed() -> None:
    async with saving() as ground:
        assert ground.gpu is not None
        gate = Gate()
        ground.gpu.tensors.stream(0).add(gate)
        ground.begin_save(keys := ground.new_keys())
        waiting = asyncio.create_task(ground.saver.wait_for_save())
        await until_blocked(waiting)
        assert not taken_on_gpu(ground)
        gate.open()
        await waiting
        await ground.end_save(keys)
        await ground.load(keys)


async def test_a_gpu_that_fails_to_gather_keeps_no_memory() -> None:
    async def fail(*args: object) -> None:
        raise GPUFailed("an illegal access")

    async with saving() as ground:
        ground.begin_save(keys := ground.new_keys())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Spool, "gather_there", fail)
            with pytest.raises(GPUFailed, match="illegal"):
                await ground.saver.wait_for_save()
        assert not taken_on_gpu(ground)
        await ground.end_save(keys)  # nothing of it was saved


@pytest.mark.parametrize("number", [1, 2])
async def test_a_way_that_is_lost_sends_what_is_left_by_the_host(number: int) -> None:
    async with saving(are_apart=True) as ground:
        with puts_held(number) as go_on:
            keys = await begin(ground)
            assert taken_on_gpu(ground) > 0
            peer = peer_of(ground.saver)
            way = peer.ways.way(peer._linked())
            assert way is not None
            way._on_lost(GPUFailed("the way was lost"))
            go_on.set()
        await ground.end_save(keys)
        await ground.load(keys)
        with by_host() as numbers:
            await ground.save(ground.new_keys())
        assert numbers == [0, 1, 2]
        await until(lambda: not taken_on_gpu(ground))


@APART
async def test_what_is_on_its_way_when_its_link_is_lost_keeps_no_memory(
    are_apart: bool,
) -> None:
    async with saving(are_apart) as ground:
        with puts_held() as go_on:
            await begin(ground)
            peer = peer_of(ground.saver)
            assert SharedPuts(peer).staged_bytes > 0
            peer.abort()
            go_on.set()
            await ground.saver.flush()
        await until(lambda: not SharedPuts(peer).staged_bytes)
        assert ground.saver.statistics().unsaved_blocks == BLOCKS
        await ground.save(ground.new_keys())  # dials
        with by_host() as numbers:
            await ground.save(keys := ground.new_keys())
        assert not numbers
        await ground.load(keys)


@contextlib.asynccontextmanager
async def one_at_once(worker: StoreWorker) -> AsyncIterator[None]:
    """Let blocks wait for each other."""
    at_once = worker._saving._rank.at_once
    for _ in range(at_once._value - 1):
        await at_once.acquire()
    before = at_once._value
    yield
    while at_once._value < 16:
        at_once.release()
    assert before == 1


async def test_what_waits_for_a_link_that_is_lost_makes_room_for_the_next_one() -> None:
    async with saving() as ground, one_at_once(ground.saver):
        with puts_held() as go_on:
            await begin(ground)
            leaving, line = ground.saver._saving._leaving, ground.saver._line
            assert leaving.used_bytes == BLOCKS * BLOCK_NBYTES
            peer_of(ground.saver).abort()
            await line.store()  # others need it now
            assert leaving.used_bytes <= BLOCK_NBYTES
            go_on.set()
            await ground.saver.flush()
        assert ground.saver.statistics().unsaved_blocks == BLOCKS
        assert not leaving.used_bytes
        with by_host() as numbers:
            await ground.save(keys := ground.new_keys())
        assert not numbers
        await ground.load(keys)


async def test_nothing_goes_by_the_next_link_behind_what_was_lost_with_one() -> None:
    async with saving(push_buffer_size=2 * BLOCK_NBYTES) as ground:
        async with one_at_once(ground.saver):
            with puts_held() as go_on, by_host() as numbers:
                keys = await begin(ground)
                assert numbers == [2]
                peer_of(ground.saver).abort()
                go_on.set()
                await ground.saver.flush()
        stored = await ground.store.contains(named(ground, keys))
        assert stored == (False, False, False)
        stats = ground.saver.statistics()
        assert stats.skipped_blocks == 2 and stats.unsaved_blocks == BLOCKS
        await ground.save(keys)  # begun again it is stored
        await ground.load(keys)


async def test_a_link_that_is_lost_while_blocks_are_gathered_loses_none() -> None:
    async with saving() as ground:
        gather, line = Spool.gather_there, ground.saver._line
        lost = list[int]()

        async def losing(spool: Spool, place: Any, ids: Any, index: int) -> None:
            await gather(spool, place, ids, index)
            if not lost:
                lost.append(index)
                peer_of(ground.saver).abort()
                await line.store()

        with pytest.MonkeyPatch.context() as patch, by_host() as numbers:
            patch.setattr(Spool, "gather_there", losing)
            await ground.save(keys := ground.new_keys())
        assert numbers == lost == [0]
        await ground.load(keys)


@pytest.mark.parametrize("closes", ["aclose", "abort"])
@pytest.mark.parametrize("wait", [0, 1])
async def test_a_worker_that_ends_keeps_no_memory(closes: str, wait: int) -> None:
    async with saving() as ground:
        with puts_held():
            await begin(ground)
            peer = peer_of(ground.saver)
            for _ in range(wait):
                await asyncio.sleep(0)
            assert SharedPuts(peer).staged_bytes > 0
            if closes == "aclose":
                await ground.saver.aclose()
            else:
                ground.saver.abort()
            await until(lambda: not SharedPuts(peer).staged_bytes)
        pages = None if peer.on_gpu is None else peer.on_gpu.device_pages
        assert pages is not None
        await until(lambda: not pages.is_open)  # CUDA has it back


async def test_what_is_gathered_as_its_worker_ends_keeps_no_memory() -> None:
    async with saving() as ground:
        peer, saving_ = peer_of(ground.saver), ground.saver._saving
        block = saving_._leaving.take(BLOCK_NBYTES)
        assert block is not None
        ground.begin_save(ground.new_keys())
        ground.saver._transfers.abort()
        saving_._begin(saving_._saves[0], block)
        assert block.is_released and not SharedPuts(peer).staged_bytes
        with pytest.raises(PeerLost):
            await block.put("key")


async def test_a_store_in_host_memory_is_sent_to_from_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "asynckv.buffers.importing")
    async with saving() as ground, one_store_in_host_memory(ground) as worker:
        keys = tuple(f"{number}" for number in range(2))
        for _ in range(2):  # the first one dials
            order = StoreOrder("s", keys, ((5, 2),))
            with by_host() as numbers:
                worker.bind_connector_metadata(StoreMetadata(saves=(order,)))
                await worker.wait_for_save()
                await worker.flush()
            assert numbers == [0, 1]
            assert caplog.text.count("goes through host memory") == 1
        assert peer_of(worker).on_gpu is not None
        assert worker.statistics().saved_blocks == 4


@contextlib.asynccontextmanager
async def one_store_in_host_memory(ground: StoreGround) -> AsyncIterator[StoreWorker]:
    """Yield a worker of the ground's caches that saves there."""
    async with open_store_ground("unix", LARGE) as other:
        async with ground.new_worker(config_of(other.url, "cuda")) as worker:
            yield worker
