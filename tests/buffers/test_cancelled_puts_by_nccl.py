"""What a peer on one GPU puts into buffers on another one, cancelled anywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.testing.blocked import until
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import is_same
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.gpu_puts import LAYERS, check_is_in
from asynckv.testing.gpu_stores import GpuStores, open_gpu_stores
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.testing.nccl_buffer_pairs import NcclBuffers, open_nccl_buffers


@pytest.fixture
async def pair(two_gpus: FakeGpus) -> AsyncIterator[NcclBuffers]:
    async with open_nccl_buffers(two_gpus) as pair:
        await pair.opened()
        yield pair


@pytest.fixture
async def stores(two_gpus: FakeGpus) -> AsyncIterator[GpuStores]:
    async with open_gpu_stores(two_gpus, theirs=1) as pair:
        await pair.opened()
        yield pair


async def test_a_cancelled_insert_leaves_no_trace_on_either_gpu(
    pair: NcclBuffers,
) -> None:
    tensor = pair.theirs.tensor
    key, hidden = tensor(noise(MIB, 1)), tensor(noise(8))
    entries = pair.buffer.ledger.book.entries

    async def before() -> None:
        key.as_subclass(torch.Tensor).copy_(noise(MIB, 1))

    async def check(k: int, mode: CancelMode, outcome: Outcome[str]) -> None:
        key.fill_(0)
        await pair.peer.lookup.peek([1])  # all that was said before is heard
        await until(lambda: not coming(pair))
        assert entries or outcome.cancelled
        if entries:
            await check_is_in(pair)
        await pair.emptied()

    lookup = pair.peer.lookup
    await sweep_cancellation(
        lambda: lookup.insert([1], None, key, None, hidden), check, before=before
    )
    assert pair.has_put and pair.peer.transport == "nccl"


def coming(pair: NcclBuffers) -> int:
    every = [services.lookup for services in pair.server._services]
    return sum(len(lookup._tasks) for lookup in every if lookup is not None)


async def test_a_cancelled_put_of_a_layer_may_be_made_again(pair: NcclBuffers) -> None:
    source = pair.theirs.tensor(noise(MIB, 3))
    async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
        is_put = False

        async def put() -> None:
            if not is_put:
                await writer.put("key", source)

        async def before() -> None:
            source.as_subclass(torch.Tensor).copy_(noise(MIB, 3))

        async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
            nonlocal is_put
            source.fill_(0)
            is_put = not outcome.cancelled

        modes: tuple[CancelMode, ...] = ("task", "completion")
        await sweep_cancellation(put, check, before=before, modes=modes)
        await writer.put("hidden", noise(8))
    assert pair.peer.transport == "nccl"
    await check_is_in(pair, 3)


async def test_a_cancelled_put_leaves_the_old_value_or_the_new_one(
    stores: GpuStores,
) -> None:
    source = stores.theirs.tensor(noise(MIB, 2))

    async def before() -> None:
        source.as_subclass(torch.Tensor).copy_(noise(MIB, 2))
        await stores.store.put("key", noise(MIB, 1))

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        source.fill_(0)
        value = await stores.peer.store.get("key")
        if not (outcome.cancelled and is_same(value, noise(MIB, 1))):
            assert is_same(value, noise(MIB, 2))
        await until(lambda: stores.store.statistics().used_bytes == MIB)

    store = stores.peer.store
    await sweep_cancellation(lambda: store.put("key", source), check, before=before)
    assert stores.has_put and stores.peer.transport == "nccl"


async def test_memory_of_the_host_is_quiet_when_a_cancelled_insert_ends(
    pair: NcclBuffers,
) -> None:
    tensor = pair.theirs.tensor
    key, value = tensor(noise(MIB, 1)), noise(MIB, 2)

    async def before() -> None:
        value.copy_(noise(MIB, 2))

    async def check(k: int, mode: CancelMode, outcome: Outcome[str]) -> None:
        value.fill_(0)
        await pair.peer.lookup.peek([1])
        await until(lambda: not coming(pair))
        if pair.buffer.ledger.book.entries:
            entry = await pair.buffer.drop_select([1])
            assert isinstance(entry.value, torch.Tensor)
            assert is_same(entry.value, noise(MIB, 2))
            del entry
        await pair.emptied()

    lookup = pair.peer.lookup
    await sweep_cancellation(
        *(lambda: lookup.insert([1], None, key, value, None), check),
        before=before,
        modes=("task",),
    )
