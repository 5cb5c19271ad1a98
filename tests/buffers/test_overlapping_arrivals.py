"""What arrives for a GPU: copied there while more of it is on the wire.

No clock says so, held copies do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import torch

from asynckv import GPUFailed, KVEntry, LookupBuffer, Peer, TensorSpec, connect, serve
from asynckv.links.dial import dial
from asynckv.links.link import Link
from asynckv.protocol.frames import Accepted
from asynckv.protocol.transfer import ReceiveState, Verdict
from asynckv.protocol.transfer_frames import Sent
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import bytes_of
from asynckv.testing import CancelMode, Outcome, sweep_cancellation, until
from asynckv.testing.expectations import is_same, only
from asynckv.testing.lookup_checks.values import MIB, noise
from harness.fake_devices import FakeDevice, fake_device
from harness.held_copies import held_copies
from harness.link_pairs import name_of
from harness.raw_inserts import RawInsert

LAYERS = {name: TensorSpec((MIB,), "uint8") for name in ("key", "value")}


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    with fake_device(max_delay=2) as gpu:
        yield gpu


@asynccontextmanager
async def consuming(gpu: FakeDevice) -> AsyncIterator[tuple[LookupBuffer, Peer]]:
    """A buffer in host memory, and a peer that wants things on a GPU."""
    async with (
        LookupBuffer("8MiB", drain_s=0) as lookup,
        serve("tcp://127.0.0.1:0", lookup=lookup) as server,
        connect(server.url + "?payload=inline", max_bytes="8MiB") as peer,
    ):
        peer.pool.lanes = gpu.lanes()
        yield lookup, peer


def places(gpu: FakeDevice) -> dict[str, torch.Tensor]:
    return {name: gpu.tensor(noise(MIB) * 0) for name in LAYERS}


async def test_what_has_landed_is_on_the_gpu_while_others_are_on_the_wire(
    gpu: FakeDevice,
) -> None:
    into = places(gpu)
    async with consuming(gpu) as (lookup, peer):
        task = asyncio.ensure_future(peer.lookup.drop_select([1], into=into))
        async with lookup.open_insert([1], None, LAYERS) as writer:
            await writer.put("key", noise(MIB, 1))
            await until(lambda: is_same(into["key"], noise(MIB, 1)))
            assert not task.done()
            await writer.put("value", noise(MIB, 2))
        entry = await task
        assert entry.key is into["key"] and entry.value is into["value"]
        assert is_same(into["value"], noise(MIB, 2)) and not peer.budget.used_bytes


async def test_what_is_aborted_after_some_was_lifted_is_overwritten(
    gpu: FakeDevice,
) -> None:
    into = places(gpu)
    async with consuming(gpu) as (lookup, peer):
        task = asyncio.ensure_future(peer.lookup.drop_select([1], into=into))
        with contextlib.suppress(ZeroDivisionError):
            async with lookup.open_insert([1], None, LAYERS) as writer:
                await writer.put("key", noise(MIB, 1))
                await until(lambda: is_same(into["key"], noise(MIB, 1)))
                raise ZeroDivisionError
        await lookup.insert([1], None, noise(MIB, 3), noise(MIB, 4), None)
        await task
        assert is_same(into["key"], noise(MIB, 3))
        assert is_same(into["value"], noise(MIB, 4))


async def test_a_gpu_that_fails_before_all_has_come_gives_the_entry_back(
    gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    async with consuming(gpu) as (lookup, peer):
        into = places(gpu)
        task = asyncio.ensure_future(peer.lookup.drop_select([1], into=into))
        async with lookup.open_insert([1], None, LAYERS) as writer:
            with monkeypatch.context() as patch:
                patch.setattr(gpu.process.cuda, "copy", fail)
                await writer.put("key", noise(MIB, 1))
                with pytest.raises(GPUFailed, match="off the bus"):
                    await task
            await writer.put("value", noise(MIB, 2))
        entry = await peer.lookup.drop_select([1])
        assert is_same(only(entry.key), noise(MIB, 1))
        assert entry.attempt == 2


async def test_a_cancelled_select_of_several_leaves_the_gpu_alone(
    gpu: FakeDevice,
) -> None:
    into = places(gpu)
    async with consuming(gpu) as (lookup, peer):

        async def use() -> KVEntry:
            inserting = lookup.open_insert([1], None, LAYERS)
            selecting = asyncio.ensure_future(peer.lookup.drop_select([1], into=into))
            try:
                async with inserting as writer:
                    await writer.put("key", noise(MIB, 1))
                    await until(lambda: is_same(into["key"], noise(MIB, 1)))
                    await writer.put("value", noise(MIB, 2))
                return await selecting
            finally:
                selecting.cancel()
                await asyncio.wait({selecting})

        async def check(k: int, mode: CancelMode, outcome: Outcome[KVEntry]) -> None:
            assert not [x for x in gpu.process.space.allocations() if x.users]
            for tensor in into.values():
                tensor.fill_(9)
            await peer.lookup.peek([1])
            if lookup.statistics().entries:
                await peer.lookup.drop_select([1])
            assert all(bool((tensor == 9).all()) for tensor in into.values())
            await until(lambda: not peer.budget.used_bytes)

        await sweep_cancellation(use, check, modes=("task",))


@asynccontextmanager
async def putting(gpu: FakeDevice) -> AsyncIterator[tuple[LookupBuffer, Link]]:
    """A buffer on a GPU, and a producer that says what it likes."""
    async with (
        LookupBuffer("8MiB", device=gpu.device, drain_s=0) as lookup,
        serve("tcp://127.0.0.1:0", lookup=lookup) as server,
    ):
        link = await dial(server.url, identity=name_of("producer"))
        yield lookup, link
        await link.aclose()


def put(link: Link, raw: RawInsert, part: int, digest: bytes | None = None) -> None:
    source = bytes_of(noise(MIB, part))
    link.payload.send(raw.transfer, part, source, lambda *_: None)
    raw.stream.send(Sent(raw.transfer, part, digest or digest_of(source)))


async def test_what_was_put_is_on_the_gpu_while_others_are_on_the_wire(
    gpu: FakeDevice,
) -> None:
    async with putting(gpu) as (lookup, link):
        raw = RawInsert(link, MIB, MIB, MIB)
        await raw.granted()
        (entry,) = lookup.ledger.table.entries.values()
        for part in (1, 0):
            put(link, raw, part)
            await until(lambda: part in entry.landed)  # noqa: B023
        assert entry.landed == [1, 0]
        put(link, raw, 2)
        assert await raw.last() == Accepted()
        found = (await lookup.drop_select()).key
        assert isinstance(found, dict)
        for part in range(3):
            assert is_same(found[str(part)], noise(MIB, part))


async def test_what_was_put_is_copied_while_more_of_it_lands(
    gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    come, compare = list[int](), ReceiveState.compare

    def note(state: ReceiveState, part: int, landed: bytes, sent: bytes) -> Verdict:
        come.append(part)
        return compare(state, part, landed, sent)

    monkeypatch.setattr(ReceiveState, "compare", note)
    async with putting(gpu) as (lookup, link):
        raw = RawInsert(link, MIB, MIB)
        await raw.granted()
        (entry,) = lookup.ledger.table.entries.values()
        with held_copies(gpu.process) as gate:
            put(link, raw, 0)
            await until(lambda: come == [0])
            put(link, raw, 1)
            await until(lambda: come == [0, 1])
            assert not entry.landed
            gate.open()
            assert await raw.last() == Accepted()
        assert entry.landed == [0, 1]


async def test_wrong_bytes_end_an_insert_of_which_some_is_on_the_gpu(
    gpu: FakeDevice,
) -> None:
    async with putting(gpu) as (lookup, link):
        raw = RawInsert(link, MIB, MIB)
        await raw.granted()
        (entry,) = lookup.ledger.table.entries.values()
        put(link, raw, 0)
        await until(lambda: entry.landed == [0])
        put(link, raw, 1, b"x" * 16)
        assert (await raw.failure()).code == "ChecksumError"
        await until(lambda: not lookup.statistics().used_bytes)
