from __future__ import annotations

from asynckv.protocol.transfer_frames import DeviceGrant, DeviceSkip
from asynckv.testing.blocked import until
from harness.nccl_pairs import NcclPair


def answers(pair: NcclPair, kind: type) -> int:
    return sum(isinstance(frame, kind) for frame in pair.channels[1].said)


async def test_what_nobody_waits_for_is_skipped_and_not_granted(pair: NcclPair) -> None:
    told, source = list[object](), pair.memory(0, b"abc")
    pair.far.announce(1)
    pair.near.send(1, 0, source, lambda *found: told.append(found))
    await until(lambda: bool(told))
    assert (answers(pair, DeviceSkip), answers(pair, DeviceGrant)) == (1, 0)


async def test_each_part_is_told_of_when_it_is_whole(pair: NcclPair) -> None:
    source, target = pair.memory(0, bytes([7]) * 130), pair.memory(1, bytes(130))
    told = list[object]()
    pair.far.receive(1, 0, target, lambda *found: told.append(found))
    assert bool(pair.far.receiver)
    pair.near.send(1, 0, source, lambda digest, error: None)
    await until(lambda: bool(told))
    assert pair.content(1, target) == bytes([7]) * 130
    assert not pair.far.receiver and not pair.far.receiver.nbytes


async def test_what_is_stopped_is_written_to_no_more(pair: NcclPair) -> None:
    source, target = pair.memory(0, bytes([7]) * 1000), pair.memory(1, bytes(1000))
    pair.far.receive(1, 0, target, lambda digest, error: None)
    pair.near.send(1, 0, source, lambda digest, error: None)
    await until(lambda: pair.far.landed_bytes(1) > 0)
    await pair.far.quiesce(1)
    pair.processes[1].cuda.view(target)[:] = 0
    await until(lambda: not pair.near.sender)
    assert pair.content(1, target) == bytes(1000)
