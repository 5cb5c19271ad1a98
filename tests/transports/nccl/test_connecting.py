from __future__ import annotations

from asynckv.errors import GPUFailed, PeerLost
from asynckv.protocol.transfer_frames import MeetDevice, PrepareDevice
from asynckv.testing.blocked import until
from harness.nccl_pairs import NcclPair


def said(pair: NcclPair, kind: type) -> list[object]:
    both = [*pair.channels[0].said, *pair.channels[1].said]
    return [frame for frame in both if isinstance(frame, kind)]


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


async def test_a_pipe_that_breaks_ends_the_transport_on_both_sides(
    pair: NcclPair,
) -> None:
    source, target = pair.memory(0, b"abc"), pair.memory(1, bytes(3))
    pair.processes[0].nccl.async_error = GPUFailed("remote", code=6)
    pair.near.send(1, 0, source, lambda digest, error: None)
    pair.far.receive(1, 0, target, lambda digest, error: None)
    await until(lambda: bool(pair.lost[0] and pair.lost[1]))
    assert [type(error) for error in (*pair.lost[0], *pair.lost[1])] == [PeerLost] * 2
    assert [worker.health for worker in pair.workers] == ["ok", "ok"]
