from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from asynckv.abc import SelectStream
from asynckv.buffers.local.writer import LocalViews
from asynckv.buffers.lookup import LookupBuffer
from asynckv.connectors.p2p.load import WholeEntry, open_entry
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import GpuPair, open_gpu_pair


@pytest.fixture
async def pair(gpus: FakeGpus) -> AsyncIterator[GpuPair]:
    async with open_gpu_pair(gpus) as pair:
        await pair.buffer.insert(
            [1], None, {"a": noise(MIB)}, None, noise(8), entry_id="e"
        )
        yield pair


async def test_on_the_same_gpu_its_tensors_are_views(pair: GpuPair) -> None:
    async with open_entry(pair.peer.lookup, "e") as entry:
        assert isinstance(entry, WholeEntry)
        found = {name: one.is_cuda async for name, one in entry}
        assert found == {"a.key": True, "hidden": True} == dict.fromkeys(found, True)
        assert is_same((await entry.wait_for("a.key")).cpu(), noise(MIB))
        assert entry.specs["a.key"].nbytes == MIB and pair.peer.on_gpu is not None
        assert not pair.peer.on_gpu.arena.used_bytes
    await until(lambda: not pair.buffer.statistics().used_bytes)


async def test_elsewhere_it_comes_as_it_lands() -> None:
    async with LookupBuffer("4MiB") as buffer:
        await buffer.insert([1], None, noise(8), None, None, entry_id="e")
        async with open_entry(buffer, "e") as entry:
            assert not isinstance(entry, WholeEntry)
            assert is_same(await entry.wait_for("key"), noise(8))
        assert not buffer.statistics().entries


async def test_on_the_buffers_own_gpu_it_is_seen_as_it_lands(pair: GpuPair) -> None:
    async with open_entry(pair.buffer, "e") as entry:
        assert isinstance(entry, LocalViews)
        assert is_same((await entry.wait_for("a.key")).cpu(), noise(MIB))
    assert not pair.buffer.statistics().used_bytes


async def read_and_fail(entry: SelectStream) -> None:
    kept = await entry.wait_for("a.key")
    raise ValueError(f"no use for {kept.nbytes} bytes")


@pytest.mark.parametrize("is_own", [True, False])
async def test_an_error_that_is_kept_keeps_no_memory(
    pair: GpuPair, is_own: bool
) -> None:
    buffer = pair.buffer if is_own else pair.peer.lookup
    with pytest.raises(ValueError, match="no use") as kept:
        async with open_entry(buffer, "e") as entry:
            await read_and_fail(entry)
    await until(lambda: not pair.buffer.statistics().leased)
    assert await pair.buffer.withdraw("e")
    await until(lambda: not pair.buffer.statistics().used_bytes)
    assert kept.value.__traceback__ is not None


async def test_an_error_of_who_has_copies_is_left_as_it_is() -> None:
    async with LookupBuffer("4MiB") as buffer:
        await buffer.insert([1], None, {"a": noise(8)}, None, None, entry_id="e")
        with pytest.raises(ValueError, match="no use") as kept:
            async with open_entry(buffer, "e") as entry:
                await read_and_fail(entry)
        assert "kept" in kept.traceback[-1].locals
        assert await buffer.withdraw("e")
