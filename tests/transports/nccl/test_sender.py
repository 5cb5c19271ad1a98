from __future__ import annotations

import asyncio

from asynckv.protocol.device_frames import DeviceOffer
from asynckv.protocol.digests import digest_of
from asynckv.testing.blocked import until
from harness.nccl_pairs import NcclPair


def offers(pair: NcclPair) -> list[DeviceOffer]:
    return [one for one in pair.channels[0].said if isinstance(one, DeviceOffer)]


async def test_a_part_is_cut_into_operations_of_one_size_and_a_rest(
    pair: NcclPair,
) -> None:
    told = asyncio.Event()
    pair.far.receive(1, 0, memoryview(bytearray(150)), lambda digest, error: None)
    pair.near.send(1, 0, memoryview(bytes(150)), lambda digest, error: told.set())
    await told.wait()
    assert [one.nbytes for one in offers(pair)] == [64, 64, 22]
    assert [one.offset for one in offers(pair)] == [0, 64, 128]
    assert not pair.near.sender.nbytes and not pair.near.sender.is_busy


async def test_to_the_sender_what_nobody_wants_has_left(pair: NcclPair) -> None:
    told: list[bytes] = []
    content = bytes(range(200))
    pair.far.announce(1)
    pair.near.send(1, 0, memoryview(content), lambda digest, error: told.append(digest))
    await until(lambda: bool(told))
    assert told == [digest_of(content)]
    assert not pair.near.sender


async def test_no_more_is_filled_than_there_are_slots(pair: NcclPair) -> None:
    pair.channels[1].holds = True
    pair.far.announce(1)
    pair.near.send(1, 0, memoryview(bytes(1000)), lambda digest, error: None)
    await until(lambda: len(offers(pair)) == 2)
    assert pair.near.sender.nbytes == 128
    pair.channels[1].holds = False
    pair.channels[1].pass_on()
    await until(lambda: not pair.near.sender)
