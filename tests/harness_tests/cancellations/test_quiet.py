"""The checks of the scenarios can fail: what is wrong or left behind is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.connectors.options import Direction
from asynckv.connectors.requests import P2PMetadata
from asynckv.testing.blocked import until
from harness.cancellations import grounds as quiet
from harness.cancellations.connectors import grounds
from harness.cancellations.connectors.grounds import ToyCaches, has_let_go, open_p2p
from harness.cancellations.connectors.store_grounds import open_store_ground
from harness.cancellations.entries import Entries, expect_overwritten
from harness.cancellations.grounds import Ground, open_ground
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import toy_shape

MODEL = ToyModel(layers=2)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "_TIMEOUT_S", 0.05)
    monkeypatch.setattr(grounds, "_TIMEOUT_S", 0.2)


@pytest.fixture
async def ground() -> AsyncIterator[Ground]:
    """One by a link, that is quiet in the beginning and at the end."""
    async with open_ground("mem") as ground:
        await ground.check_quiet()
        yield ground
        await ground.check_quiet()


@pytest.fixture
async def here() -> AsyncIterator[Ground]:
    async with open_ground("local") as ground:
        yield ground


async def left_in(ground: Ground) -> str:
    with pytest.raises(AssertionError, match="left behind: ") as caught:
        await ground.check_quiet()
    return str(caught.value)


async def test_an_entry_its_bytes_its_lease_and_its_streams_are_told(
    ground: Ground,
) -> None:
    await ground.local.insert([1], None, torch.zeros(100), None, None)
    assert "entries: 1, arena bytes: " in await left_in(ground)
    async with ground.consumer.drop_select([1]):
        told = await left_in(ground)
    assert "leases: 1" in told and "deliveries served: 1" in told
    assert told.count("streams: 1") == 2


async def test_a_call_that_waits_is_told(ground: Ground) -> None:
    waiting = asyncio.ensure_future(ground.consumer.drop_select([1]))
    await until(lambda: ground.local.statistics().waiting_selects == 1)
    assert "selecting: 1" in await left_in(ground)
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_a_tensor_that_nobody_took_from_the_pipe_is_told(ground: Ground) -> None:
    assert ground.pipe is not None
    near, far = ground.pipe
    await near.send_tensor(torch.zeros(10))
    assert "bytes held: " in await left_in(ground)
    await far.recv_tensor()


async def test_a_lost_entry_one_taken_and_another_one_are_told(here: Ground) -> None:
    entries = Entries(here, 100)
    await entries.bring()
    await here.local.withdraw(entries.name)
    with pytest.raises(AssertionError, match="0 entries, 0 acknowledged"):
        entries.expect_in(True)
    await entries.bring()
    await entries.clear(here)
    with pytest.raises(AssertionError, match="0 entries, 1 acknowledged"):
        entries.expect_in(True)
    await entries.bring()
    entries.begin()
    with pytest.raises(AssertionError, match="is not"):
        await entries.take(here.consumer)


async def test_other_bytes_are_told(here: Ground) -> None:
    entries = Entries(here, 100)
    entries.begin()
    wrong = torch.zeros(100, dtype=torch.uint8)
    await here.local.insert([1], None, wrong, None, None, entry_id=entries.name)
    with pytest.raises(AssertionError, match="with its bytes"):
        await entries.take(here.consumer)


def test_memory_that_was_written_to_is_told() -> None:
    with pytest.raises(AssertionError, match="was written to"):
        expect_overwritten(torch.zeros(3))


@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_what_is_left_of_two_engines_is_told(direction: Direction) -> None:
    async with open_p2p("mem", direction) as engines:
        await engines.hand_over()
        await engines.check_quiet()
        staying = asyncio.create_task(asyncio.Event().wait(), name="staying")
        with pytest.raises(AssertionError, match="task staying"):
            await engines.check_quiet()
        staying.cancel()
        worker = engines.decode.workers[0]
        order = engines.load_request("never comes")
        worker.bind_connector_metadata(P2PMetadata(loads=(order,)))
        await worker.start_load_kv()
        with pytest.raises(AssertionError, match="left behind"):
            await has_let_go(worker)


async def test_blocks_that_are_not_stored_any_more_are_told() -> None:
    async with open_store_ground("mem") as store:
        keys = store.new_keys()
        await store.save(keys)
        await store.load(keys)
        await store.check_quiet()
        with pytest.raises(AssertionError, match="not stored any more"):
            await store.load(keys)


def test_a_wrong_byte_of_a_cache_and_a_late_write_to_it_are_told() -> None:
    caches = ToyCaches(MODEL, toy_shape(MODEL), 0, 0)
    caches.compute()
    caches.expect_computed()
    caches.layers[MODEL.layer_names[1]][1, caches.block_ids[2], 3, 1, 7] += 1
    with pytest.raises(AssertionError, match=r"layers\.1\.attn is wrong"):
        caches.expect_computed()
    caches.spoil()
    caches.expect_spoilt()
    caches.layers[MODEL.layer_names[0]][0, 7, 15, 3, 0] = 0
    with pytest.raises(AssertionError, match=r"layers\.0\.attn was written to"):
        caches.expect_spoilt()
