"""Blocks of a paged cache, from ``insert`` to ``into``, over every kind of link."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.abc import KVLookupBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.tensors.blocks import KVBlocks
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.pairs import SCHEMES, open_peers

_HERE, _THERE = [7, 0, 1, 2, 40, 9], [3, 60, 61, 5, 4, 11]
_SMALL, _LARGE = 256, 32 * 1024

Ends = tuple[KVLookupBuffer, KVLookupBuffer]


@pytest.fixture(params=["local", *SCHEMES])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    async with LookupBuffer("16MiB", drain_s=0) as local:
        if request.param == "local":
            yield local, local
            return
        async with open_peers(request.param, local) as peers:
            yield peers.producer.lookup, peers.consumer.lookup


def _cache(block: int) -> torch.Tensor:
    """Keys and values beside each other, as some engines have them."""
    return torch.randint(0, 255, (64, 2, block // 4), dtype=torch.int32)


@pytest.mark.parametrize("block", [_SMALL, _LARGE])
async def test_blocks_go_from_one_cache_to_another(ends: Ends, block: int) -> None:
    producer, consumer = ends
    here, there = _cache(block), _cache(block)
    before = there.clone()
    key, value = (KVBlocks(here[:, i], _HERE) for i in (0, 1))
    await producer.insert([1], None, {"0": key}, {"0": value}, None)
    into = {f"0.{kind}": KVBlocks(there[:, i], _THERE) for i, kind in _KINDS}
    entry = await consumer.drop_select([1], into=into)
    assert torch.equal(there[_THERE], here[_HERE])
    untouched = [i for i in range(64) if i not in _THERE]
    assert torch.equal(there[untouched], before[untouched])
    assert isinstance(entry.key, dict)
    assert entry.key["0"].data_ptr() == there.data_ptr()


_KINDS = ((0, "key"), (1, "value"))


@pytest.mark.parametrize("block", [_SMALL, _LARGE])
async def test_blocks_go_by_layer(ends: Ends, block: int) -> None:
    producer, consumer = ends
    here, there = _cache(block), _cache(block)
    specs = {"0.key": KVBlocks(here, _HERE).spec}
    into = {"0.key": KVBlocks(there, _THERE)}
    async with producer.open_insert([1], None, specs) as writer:
        await writer.put("0.key", KVBlocks(here, _HERE))
    async with consumer.open_drop_select([1], into=into) as stream:
        assert [name async for name, _ in stream] == ["0.key"]
    assert torch.equal(there[_THERE], here[_HERE])


async def test_blocks_land_as_one_tensor_and_a_tensor_in_blocks(ends: Ends) -> None:
    producer, consumer = ends
    here, there = _cache(_LARGE), _cache(_LARGE)
    await producer.insert([1], None, KVBlocks(here, _HERE), None, None)
    entry = await consumer.drop_select([1])
    assert isinstance(entry.key, torch.Tensor)
    assert torch.equal(entry.key, here[_HERE])
    await producer.insert([2], None, entry.key, None, None)
    await consumer.drop_select([2], into={"key": KVBlocks(there, _THERE)})
    assert torch.equal(there[_THERE], here[_HERE])


async def test_rows_that_lie_apart_are_sent_and_landed_in(ends: Ends) -> None:
    producer, consumer = ends
    here, there = _cache(_LARGE), _cache(_LARGE)
    await producer.insert([1], None, here[:, 1], None, None)
    entry = await consumer.drop_select([1], into={"key": there[:, 0]})
    assert torch.equal(there[:, 0], here[:, 1])
    assert isinstance(entry.key, torch.Tensor)
    assert entry.key.shape == here[:, 1].shape


async def test_the_same_blocks_again_are_the_same_entry(ends: Ends) -> None:
    producer, _ = ends
    here = _cache(_LARGE)
    for key in (KVBlocks(here, _HERE), here[_HERE]):
        await producer.insert([1], None, key, None, None, entry_id="mine")
    assert await producer.withdraw("mine")


@pytest.mark.parametrize("ids", [[1, 2, 1, 3, 4, 5], [1, 2]])
async def test_blocks_that_do_not_fit_are_refused(ends: Ends, ids: list[int]) -> None:
    producer, consumer = ends
    await producer.insert([1], None, KVBlocks(_cache(_LARGE), _HERE), None, None)
    with pytest.raises(ValueError, match="twice|is blocks of"):
        await consumer.drop_select([1], into={"key": KVBlocks(_cache(_LARGE), ids)})
    assert await consumer.peek([1]) == 1


async def test_blocks_are_quiet_once_the_call_is_cancelled() -> None:
    here, there = _cache(_LARGE), _cache(_LARGE)
    async with LookupBuffer("16MiB", drain_s=0) as local:
        async with open_peers("tcp", local) as peers:
            consumer = peers.consumer.lookup

            async def before() -> None:
                await local.insert([1], None, KVBlocks(here, _HERE), None, None)

            async def select() -> None:
                blocks = {"key": KVBlocks(there, _THERE)}
                await consumer.drop_select([1], into=blocks)

            async def check(
                suspension: int, mode: CancelMode, outcome: Outcome[None]
            ) -> None:
                landed = there.clone()
                if outcome.cancelled and await consumer.peek([1]):
                    entry = await consumer.drop_select([1])
                    assert isinstance(entry.key, torch.Tensor)
                    assert torch.equal(entry.key, here[_HERE])
                assert torch.equal(there, landed)

            await sweep_cancellation(select, check, before=before)
