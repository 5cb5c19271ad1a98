"""Blocks of a paged cache, and memory that lies apart, over every kind of link."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
import torch

from asynckv import KVBlocks, KVLookupBuffer, LookupBuffer, StoreBuffer, TensorSpec
from asynckv.tensors import slabs as slabs_module
from asynckv.tensors.slabs import Run, has_slabs
from asynckv.testing import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.pairs import SCHEMES, open_peers

WITH_SLABS = pytest.mark.skipif(not has_slabs(), reason="no memory files here")
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
    assert torch.equal(entry.key_tensor, here[_HERE])
    await producer.insert([2], None, entry.key_tensor, None, None)
    await consumer.drop_select([2], into={"key": KVBlocks(there, _THERE)})
    assert torch.equal(there[_THERE], here[_HERE])


async def test_rows_that_lie_apart_are_sent_and_landed_in(ends: Ends) -> None:
    producer, consumer = ends
    here, there = _cache(_LARGE), _cache(_LARGE)
    await producer.insert([1], None, here[:, 1], None, None)
    entry = await consumer.drop_select([1], into={"key": there[:, 0]})
    assert torch.equal(there[:, 0], here[:, 1])
    assert entry.key_tensor.shape == here[:, 1].shape


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
                    assert torch.equal(entry.key_tensor, here[_HERE])
                assert torch.equal(there, landed)

            await sweep_cancellation(select, check, before=before)


_MIB = 2**20

EndsApart = tuple[LookupBuffer, KVLookupBuffer, KVLookupBuffer]


def _random(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _layers() -> dict[str, torch.Tensor]:
    small = {f"small.{number}": _random(5000) for number in range(60)}
    return {
        "large": _random(3 * _MIB),
        "strided": _random(512, 3072).T,
        **small,
    }


def _runs_of(local: LookupBuffer, entry_id: str) -> Sequence[Run]:
    pages = local.ledger.table.entries[entry_id].regions[0].pages
    assert pages is not None
    return pages.runs


async def _cut_up(local: LookupBuffer) -> None:
    """Let 8 MiB be free, none of them beside another."""
    ids = [await local.insert(None, None, _random(_MIB), None, None) for _ in range(16)]
    for entry_id in sorted(ids, key=lambda one: _runs_of(local, one)[0])[::2]:
        await local.withdraw(entry_id)


@pytest.fixture(params=["local", *SCHEMES])
async def ends_apart(request: pytest.FixtureRequest) -> AsyncIterator[EndsApart]:
    async with LookupBuffer("16MiB", drain_s=0) as local:
        await _cut_up(local)
        if request.param == "local":
            yield local, local, local
            return
        async with open_peers(request.param, local) as peers:
            yield local, peers.producer.lookup, peers.consumer.lookup


@WITH_SLABS
@pytest.mark.parametrize("streams", [False, True])
async def test_bytes_that_lie_apart_are_those_that_were_inserted(
    ends_apart: EndsApart, streams: bool
) -> None:
    local, producer, consumer = ends_apart
    layers = _layers()
    names = {f"{layer}.key": tensor for layer, tensor in layers.items()}
    for how in ("await", "enter", "into", "stream"):
        if streams:
            entry_id = await _streamed(producer, names)
        else:
            entry_id = await producer.insert([99], None, layers, None, None)
        assert len(_runs_of(local, entry_id)) > 1
        found = await _taken(consumer, how, names)
        assert all(torch.equal(found[name], tensor) for name, tensor in names.items())
        del found


async def _streamed(producer: KVLookupBuffer, names: dict[str, torch.Tensor]) -> str:
    specs = {n: TensorSpec(tuple(t.shape), "uint8") for n, t in names.items()}
    async with producer.open_insert([99], None, specs) as writer:
        for name, tensor in names.items():
            await writer.put(name, tensor)
    return writer.entry_id


async def _taken(
    consumer: KVLookupBuffer, how: str, names: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    if how == "stream":
        async with consumer.open_drop_select([99]) as stream:
            return {name: tensor async for name, tensor in stream}
    if how == "await":
        entry = await consumer.drop_select([99])
    else:
        spaces = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in names.items()}
        into = spaces if how == "into" else None
        async with consumer.drop_select([99], into=into) as entry:
            pass
    assert isinstance(entry.key, dict)
    return {f"{layer}.key": tensor for layer, tensor in entry.key.items()}


@WITH_SLABS
async def test_nothing_is_mapped_for_who_only_moves_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(fd: int, runs: object, *, writable: bool) -> None:
        raise AssertionError("mapped")

    async with LookupBuffer("16MiB", drain_s=0) as local:
        await _cut_up(local)
        monkeypatch.setattr(slabs_module, "stitch", refuse)
        layers = _layers()
        entry_id = await local.insert([99], None, layers, None, None)
        assert len(_runs_of(local, entry_id)) > 1
        names = {f"{layer}.key": tensor for layer, tensor in layers.items()}
        found = await _taken(local, "into", names)
        assert all(torch.equal(found[name], tensor) for name, tensor in names.items())


@WITH_SLABS
async def test_values_of_a_store_may_lie_apart() -> None:
    async with StoreBuffer("16MiB") as store:
        for number in range(16):
            await store.put(str(number), _random(_MIB - 1))
        for number in range(0, 16, 2):
            await store.delete(str(number))
        values = _random(768, 4096).T
        await store.put("apart", values)
        found = await store.get("apart")
        assert found is not None
        assert torch.equal(found, values)
