from __future__ import annotations

from asynckv.errors import GPUFailed, PeerLost
from asynckv.protocol.device_frames import DeviceBroken, MeetDevice, PrepareDevice
from asynckv.testing.blocked import until
from asynckv.testing.nccl_pairs import NcclPair


def said(pair: NcclPair, kind: type) -> list[object]:
    both = [*pair.channels[0].said, *pair.channels[1].said]
    return [frame for frame in both if isinstance(frame, kind)]


def is_open(pair: NcclPair) -> bool:
    ends = [pair.near._connector, pair.far._connector]
    return all(end is not None and end.is_open for end in ends)


async def test_each_direction_has_a_communicator_and_a_unique_id_of_its_own(
    pair: NcclPair,
) -> None:
    assert len({frame.unique_id for frame in said(pair, MeetDevice)}) == 2  # type: ignore[attr-defined]
    assert sum(process.nccl.unique_ids for process in pair.processes) == 2


async def test_the_worker_with_the_lower_token_leads(pair: NcclPair) -> None:
    lower = min(pair.workers, key=lambda worker: worker.token)
    channel = pair.channels[pair.workers.index(lower)]
    assert any(isinstance(frame, PrepareDevice) for frame in channel.said)


async def test_turns_are_over_when_all_is_open(pair: NcclPair) -> None:
    assert [worker.turns.count for worker in pair.workers] == [0, 0]


async def test_a_broken_pipe_is_opened_again_by_both(pair: NcclPair) -> None:
    assert pair.near._connector is not None
    pair.near._connector.break_off(PeerLost("no more"), sending=True)
    assert not is_open(pair)
    await until(lambda: is_open(pair))
    assert len(said(pair, DeviceBroken)) == 2
    generations = [frame.generations for frame in said(pair, PrepareDevice)]  # type: ignore[attr-defined]
    assert generations[0] == (1, 1) and set(generations[1]) == {2, None}


async def test_a_pipe_that_breaks_again_and_again_ends_the_transport(
    pair: NcclPair,
) -> None:
    pair.processes[0].nccl.async_error = GPUFailed("remote", code=6)
    assert pair.near._connector is not None
    pair.near._connector.break_off(PeerLost("no more"), sending=True)
    await until(lambda: pair.near._ending.error is not None)
    assert isinstance(pair.near._ending.error, PeerLost | GPUFailed)
