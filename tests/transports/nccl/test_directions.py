from __future__ import annotations

import asyncio

import msgspec
import pytest

from asynckv.protocol.transfer_frames import DeviceOffer
from asynckv.testing.blocked import until
from asynckv.transports.nccl.connecting import DeviceDescription
from asynckv.transports.nccl.directions import NcclSettings
from harness.fake_gpus import FakeGpus
from harness.nccl_pairs import NcclPair

QUICK = NcclSettings(chunk_bytes=64, open_s=5.0)


def offers(pair: NcclPair) -> list[DeviceOffer]:
    return [one for one in pair.channels[0].said if isinstance(one, DeviceOffer)]


async def test_a_part_is_cut_into_operations_of_one_size_and_a_rest(
    pair: NcclPair,
) -> None:
    told = asyncio.Event()
    source, target = pair.memory(0, bytes(150)), pair.memory(1, bytes(150))
    pair.far.receive(1, 0, target, lambda digest, error: None)
    pair.near.send(1, 0, source, lambda digest, error: told.set())
    await told.wait()
    assert [one.nbytes for one in offers(pair)] == [64, 64, 22]
    assert [one.offset for one in offers(pair)] == [0, 64, 128]
    assert not pair.near.sender.nbytes and not pair.near.sender.is_busy


async def test_the_smaller_chunk_of_both_sides_counts(gpus: FakeGpus) -> None:
    made = NcclPair(gpus, lambda _: None, lambda _: None, settings=QUICK)
    theirs = DeviceDescription.decode(made.far.describe())
    said = msgspec.structs.replace(theirs, chunk_bytes=16).encode()
    async with asyncio.TaskGroup() as group:
        group.create_task(made.far.open(made.near.describe(), made.channels[1]))
        await made.near.open(said, made.channels[0])
    made.near.send(1, 0, made.memory(0, bytes(40)), lambda digest, error: None)
    assert [one.nbytes for one in offers(made)] == [16, 16, 8]
    await made.aclose()


async def test_to_the_sender_what_nobody_wants_has_left(pair: NcclPair) -> None:
    told, source = list[object](), pair.memory(0, bytes(range(200)))
    pair.far.announce(1)
    pair.near.send(1, 0, source, lambda *found: told.append(found))
    await until(lambda: bool(told))
    assert told == [(b"", None)]
    assert not pair.near.sender


@pytest.mark.parametrize("call", ["send", "receive"])
async def test_memory_of_the_host_is_refused(pair: NcclPair, call: str) -> None:
    move = getattr(pair.near, call)
    with pytest.raises(TypeError, match="memory of the host"):
        move(1, 0, memoryview(bytearray(3)), lambda digest, error: None)
