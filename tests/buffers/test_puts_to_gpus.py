"""What a peer puts from its GPU into buffers on one, by each way there is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from asynckv.buffers.remote.peer import connect
from asynckv.errors import ChecksumError, EntryConflict
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.options import Digest
from asynckv.tensors.blocks import KVBlocks
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same, only
from asynckv.testing.lookup_checks.values import (
    LOOKUP_MAX_BYTES,
    MIB,
    LookupCheck,
    noise,
)
from asynckv.testing.lookup_conformance import LOOKUP_CHECKS
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
from harness.gpu_puts import (
    LAYERS,
    PutPair,
    PutWay,
    check_is_in,
    insert,
    open_put_pair,
)
from harness.shared_puts import SharedPuts

PIECE = 32 * 1024
"""Too long to ride, and too short to be a value's own."""
BY_IPC = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")
DIGESTS = pytest.mark.parametrize("digest", ["full", "edges", "off"])


@pytest.fixture(params=[pytest.param("cuda_ipc", marks=BY_IPC), "nccl"])
def way(request: pytest.FixtureRequest) -> PutWay:
    found: PutWay = request.param
    return found


@pytest.fixture
async def pair(two_gpus: FakeGpus, way: PutWay) -> AsyncIterator[PutPair]:
    async with open_put_pair(two_gpus, way) as pair:
        yield pair


async def test_an_entry_goes_from_gpu_to_gpu(pair: PutPair, way: PutWay) -> None:
    await insert(pair)
    assert pair.has_put and pair.peer.transport == way
    assert pair.peer.lookup.sends_from == pair.theirs.device.name
    await check_is_in(pair)


async def test_layers_go_from_gpu_to_gpu_and_are_shown_at_once(pair: PutPair) -> None:
    async with (
        pair.peer.lookup.open_insert([1], None, LAYERS) as writer,
        pair.buffer.open_drop_select([1]) as stream,
    ):
        for salt, (name, spec) in enumerate(LAYERS.items(), 1):
            await writer.put(name, pair.theirs.tensor(noise(spec.nbytes, salt)))
            found = await stream.wait_for(name)
            assert found.is_cuda and is_same(found, noise(spec.nbytes, salt))
    assert pair.has_put
    await pair.emptied()


async def test_what_was_put_is_sent_on_with_its_digest(
    pair: PutPair, way: PutWay
) -> None:
    await insert(pair)
    (entry,) = pair.buffer.ledger.table.entries.values()
    assert all(part.digest for part in entry.parts)
    found = await pair.peer.lookup.drop_select([1])
    assert is_same(only(found.key), noise(MIB, 1))
    assert pair.has_moved == (way == "nccl")


async def test_each_tensor_is_put_from_wherever_it_was(
    pair: PutPair, way: PutWay
) -> None:
    gpu, host = pair.theirs.tensor, noise(MIB, 2).view(4, -1)
    pool = gpu(noise(MIB, 3).view(8, -1))
    await pair.peer.lookup.insert(
        [1],
        None,
        {"a": gpu(noise(MIB, 1)), "b": host, "c": KVBlocks(pool, [5, 1, 2])},
        {"a": gpu(noise(MIB, 4).view(16, -1)).t(), "b": KVBlocks(host, [3, 0])},
        gpu(noise(8)),
        extras={"little": noise(9), "some": gpu(noise(PIECE, 5))},
    )
    assert pair.has_put == (way != "nccl")  # which takes no memory of the host
    await until(lambda: not pair.puts.staged_bytes)
    entry = await pair.buffer.drop_select([1])
    assert isinstance(entry.key, dict) and isinstance(entry.value, dict)
    assert is_same(entry.key["a"], noise(MIB, 1)) and is_same(entry.key["b"], host)
    assert is_same(entry.key["c"], noise(MIB, 3).view(8, -1)[[5, 1, 2]])
    assert is_same(entry.value["a"], noise(MIB, 4).view(16, -1).t().contiguous())
    assert is_same(entry.value["b"], host[[3, 0]])
    assert is_same(entry.extras["little"], noise(9))
    assert is_same(entry.extras["some"], noise(PIECE, 5))


async def test_a_tensor_of_another_gpu_goes_through_host_memory(pair: PutPair) -> None:
    other = fake_device_of(pair.theirs.process, 1 - pair.theirs.index)
    await pair.peer.lookup.insert([1], None, other.tensor(noise(MIB)), None, None)
    entry = await pair.buffer.drop_select([1])
    assert is_same(only(entry.key), noise(MIB))
    assert not pair.has_put


async def test_few_bytes_ride_with_their_frame(pair: PutPair) -> None:
    key = pair.theirs.tensor(noise(PIECE))
    await pair.peer.lookup.insert([1], None, key, None, None)
    assert is_same(only((await pair.buffer.drop_select([1])).key), noise(PIECE))
    assert not pair.has_put


@DIGESTS
async def test_an_entry_is_known_again_whatever_is_compared(
    two_gpus: FakeGpus, way: PutWay, digest: Digest
) -> None:
    async with open_put_pair(two_gpus, way, serves=digest, digest=digest) as pair:
        await insert(pair, entry_id="it")
        assert pair.has_put
        await insert(pair, entry_id="it")
        if digest != "off":
            with pytest.raises(EntryConflict):
                await insert(pair, 2, entry_id="it")
        await check_is_in(pair)


async def test_an_insert_that_was_selected_while_it_waited_comes_again_with_room(
    pair: PutPair,
) -> None:
    other = await pair.buffer.insert([2], None, noise(15 * MIB), None, None)
    inserting = asyncio.create_task(insert(pair))
    await until(lambda: pair.buffer.statistics().waiting_inserts == 1)
    with pytest.raises(ZeroDivisionError):
        async with pair.buffer.drop_select([1]) as entry:
            assert is_same(only(entry.key), noise(MIB, 1))
            del entry
            raise ZeroDivisionError
    assert not pair.has_put
    assert await pair.buffer.withdraw(other)
    await inserting
    assert pair.has_put
    await check_is_in(pair)


# Other bytes than were put.


async def wrong(*anything: object) -> list[bytes]:
    return [b"of other bytes.."]


async def test_other_bytes_than_were_put_are_not_inserted(
    monkeypatch: pytest.MonkeyPatch, pair: PutPair, way: PutWay
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pair.peer.pool, "edges" if way == "cuda_ipc" else "digest", wrong)
        with pytest.raises(ChecksumError):
            await insert(pair)
        with pytest.raises(ChecksumError):
            async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
                await writer.put("key", pair.theirs.tensor(noise(MIB)))
    await pair.emptied()
    assert pair.peer.transport == way and pair.puts.are_read == (way == "cuda_ipc")
    await insert(pair)
    await check_is_in(pair)


@pytest.mark.chaos
@pytest.mark.parametrize("check", LOOKUP_CHECKS, ids=lambda check: check.__name__)
async def test_a_served_lookup_on_a_gpu_keeps_what_every_one_keeps(
    two_gpus: FakeGpus, way: PutWay, check: LookupCheck
) -> None:
    async with open_put_pair(two_gpus, way, buffer_bytes=LOOKUP_MAX_BYTES) as pair:
        there = fake_device_of(two_gpus.process(), pair.theirs.index).device
        async with connect(
            pair.server.url, device=there, max_bytes="16MiB"
        ) as producer:
            assert producer.transport == way
            assert SharedPuts(producer).are_read == (way == "cuda_ipc")
            await check(producer.lookup, pair.peer.lookup, pair.buffer)
