from __future__ import annotations

from asynckv.protocol.device_frames import DeviceGrant, DeviceSkip
from asynckv.testing.blocked import until
from harness.nccl_pairs import NcclPair


def answers(pair: NcclPair, kind: type) -> int:
    return sum(isinstance(frame, kind) for frame in pair.channels[1].said)


async def test_what_nobody_waits_for_is_skipped_and_not_granted(pair: NcclPair) -> None:
    told: list[object] = []
    pair.far.announce(1)
    pair.near.send(1, 0, memoryview(b"abc"), lambda *found: told.append(found))
    await until(lambda: bool(told))
    assert (answers(pair, DeviceSkip), answers(pair, DeviceGrant)) == (1, 0)


async def test_each_part_is_told_of_when_it_is_whole(pair: NcclPair) -> None:
    target, told = bytearray(130), list[object]()
    pair.far.receive(1, 0, memoryview(target), lambda *found: told.append(found))
    assert bool(pair.far.receiver)
    pair.near.send(1, 0, memoryview(bytes([7]) * 130), lambda digest, error: None)
    await until(lambda: bool(told))
    assert target == bytes([7]) * 130
    assert not pair.far.receiver and not pair.far.receiver.nbytes


async def test_what_is_stopped_is_written_to_no_more(pair: NcclPair) -> None:
    target = bytearray(1000)
    pair.far.receive(1, 0, memoryview(target), lambda digest, error: None)
    pair.near.send(1, 0, memoryview(bytes([7]) * 1000), lambda digest, error: None)
    await until(lambda: pair.far.landed_bytes(1) > 0)
    await pair.far.quiesce(1)
    target[:] = bytes(1000)
    await until(lambda: not pair.near.sender)
    assert target == bytes(1000)
