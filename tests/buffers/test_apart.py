"""Entries in memory that lies apart, in and out by every way there is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
import torch

from asynckv.abc import KVLookupBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.store import StoreBuffer
from asynckv.tensors import slabs as slabs_module
from asynckv.tensors.allocator import Run
from asynckv.tensors.slabs import has_slabs
from asynckv.testing.pairs import SCHEMES, open_peers
from asynckv.types import TensorSpec

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")

_MIB = 2**20

Ends = tuple[LookupBuffer, KVLookupBuffer, KVLookupBuffer]


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
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    async with LookupBuffer("16MiB", drain_s=0) as local:
        await _cut_up(local)
        if request.param == "local":
            yield local, local, local
            return
        async with open_peers(request.param, local) as peers:
            yield local, peers.producer.lookup, peers.consumer.lookup


@pytest.mark.parametrize("streams", [False, True])
async def test_bytes_that_lie_apart_are_those_that_were_inserted(
    ends: Ends, streams: bool
) -> None:
    local, producer, consumer = ends
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
