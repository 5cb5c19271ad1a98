"""What an NCCL transport does that no other can: abort, give up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from asynckv.abc import PayloadTransport
from asynckv.errors import (
    GPUFailed,
    IncompatiblePeer,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
)
from asynckv.protocol.transfer_frames import (
    DeviceDone,
    DeviceFrame,
    DeviceGrant,
    DeviceMet,
    DeviceOffer,
    DeviceReady,
    Devices,
    DeviceSkip,
    DeviceWithdraw,
    MeetDevice,
    PrepareDevice,
)
from asynckv.testing.blocked import until
from asynckv.testing.transport_checks.sides import TransportCheck
from asynckv.testing.transport_conformance import TRANSPORT_CHECKS
from asynckv.transports.nccl import transport
from harness.fake_gpus import FakeGpus
from harness.nccl_pairs import NcclPair, open_nccl_pair


@contextlib.asynccontextmanager
async def open_pair(
    near_lost: Callable[[Exception], None],
    far_lost: Callable[[Exception], None],
    *,
    digest: bool = True,
) -> AsyncIterator[tuple[PayloadTransport, PayloadTransport]]:
    async with open_nccl_pair(near_lost, far_lost, digest=digest) as pair:
        yield pair


LONG = {
    "a_cancelled_close_has_closed",
    "a_quiet_source_may_be_overwritten",
    "a_quiet_target_is_not_written_to",
    "an_abort_ends_everything_once_and_soon",
    "both_directions_move_at_once",
    "both_sides_may_stop_at_once",
    "bytes_of_any_size_land",
    "many_transfers_move_at_once",
    "memory_is_quiet_when_an_error_is_told",
    "nothing_is_left_behind",
    "parts_land_in_their_own_memory_in_any_order",
}
CHECKS = [
    pytest.param(
        check,
        id=check.__name__,
        marks=[pytest.mark.trust] if check.__name__ in LONG else [],
    )
    for check in TRANSPORT_CHECKS
]


@pytest.mark.parametrize("check", CHECKS)
async def test_it_keeps_the_contract_of_transports(check: TransportCheck) -> None:
    await check(open_pair)


def test_what_is_put_off_as_long_is_there() -> None:
    assert {check.__name__ for check in TRANSPORT_CHECKS} >= LONG


class Part:
    """One part from near to far, in memory of both GPUs."""

    def __init__(self, pair: NcclPair, transfer: int, nbytes: int = 200) -> None:
        self.pair, self.transfer = pair, transfer
        self.content = bytes(range(nbytes))
        self.ends = [pair.memory(0, self.content), pair.memory(1, bytes(nbytes))]
        self.told: list[tuple[str, BaseException | None]] = []

    def start(self) -> None:
        far, near = self.pair.far, self.pair.near
        far.receive(
            self.transfer, 0, self.ends[1], lambda _, error: self._notify("far", error)
        )
        near.send(
            self.transfer, 0, self.ends[0], lambda _, error: self._notify("near", error)
        )

    def _notify(self, side: str, error: BaseException | None) -> None:
        self.told.append((side, error))

    def has_landed(self) -> bool:
        found = self.pair.content(1, self.ends[1])
        return ("far", None) in self.told and found == self.content


async def test_what_is_not_granted_is_withdrawn(pair: NcclPair) -> None:
    part = Part(pair, 1)
    pair.channels[1].holds = True
    part.start()
    pair.near.stop(1)
    said = pair.channels[0].said
    assert any(isinstance(frame, DeviceOffer) for frame in said)
    assert any(isinstance(frame, DeviceWithdraw) for frame in said)
    pair.channels[1].holds = False
    pair.channels[1].pass_on()
    await pair.near.quiesce(1)
    assert not pair.near.sender.nbytes


async def test_a_granted_operation_whose_peer_never_posts_costs_the_transport(
    pair: NcclPair,
) -> None:
    part, beside = Part(pair, 1), Part(pair, 3)
    pair.processes[0].nccl.is_silent = True
    part.start()
    await until(lambda: bool(pair.far.receiver.nbytes))
    beside.start()
    await pair.far.quiesce(1)
    pair.processes[1].cuda.drop(part.ends[1])
    await until(lambda: len(beside.told) == 2)
    assert all(isinstance(error, PeerLost) for _, error in beside.told)
    assert len(pair.lost[1]) == 1 and not pair.gpus.faults


@pytest.mark.parametrize(
    ("side", "trouble", "value"),
    [
        (0, "is_silent", True),
        (1, "async_error", GPUFailed("remote", code=6)),
        (1, "async_error", KeyError(7)),
        (0, "async_error", GPUFailed("remote", code=6)),
    ],
    ids=["deadline", "async error", "error without a name", "of the sender"],
)
async def test_what_goes_wrong_on_one_side_ends_both(
    pair: NcclPair, side: int, trouble: str, value: object
) -> None:
    part = Part(pair, 1)
    setattr(pair.processes[side].nccl, trouble, value)
    part.start()
    await until(lambda: len(part.told) == 2)
    assert all(isinstance(error, PeerLost) for _, error in part.told)
    await until(lambda: bool(pair.lost[0] and pair.lost[1]))
    assert [len(lost) for lost in pair.lost] == [1, 1]
    assert [worker.health for worker in pair.workers] == ["ok", "ok"]


async def test_a_worker_that_cannot_be_recovered_says_so_and_keeps_its_memory(
    pair: NcclPair,
) -> None:
    part = Part(pair, 1)
    pair.processes[1].nccl.abort_ticks = None
    pair.processes[0].nccl.is_silent = True
    part.start()
    await until(lambda: any(side == "far" for side, _ in part.told))
    assert pair.far.health.startswith("failed: ")
    assert pair.workers[1].kept
    assert pair.near.health == "ok"


WATCH_S = 0.01


@pytest.fixture
def short_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_WATCH_S", WATCH_S)


@pytest.mark.usefixtures("short_watch")
async def test_a_worker_that_is_stuck_when_all_is_over_is_given_up(
    pair: NcclPair,
) -> None:
    pair.processes[0].nccl.destroy_blocks = True
    await pair.far.aclose()
    await pair.near.aclose()
    await until(lambda: pair.near.health.startswith("failed: "))
    pair.processes[0].nccl.destroy_blocks = False


async def test_a_destroy_that_blocks_does_not_block_the_loop(pair: NcclPair) -> None:
    pair.processes[0].nccl.destroy_blocks = True
    await pair.far.aclose()
    async with asyncio.timeout(5):
        await pair.near.aclose()
    pair.processes[0].nccl.destroy_blocks = False


async def test_what_was_stopped_and_is_never_posted_ends_with_the_peer(
    patient_pair: NcclPair,
) -> None:
    pair, part = patient_pair, Part(patient_pair, 1)
    pair.processes[0].nccl.is_silent = True
    part.start()
    await until(lambda: bool(pair.far.receiver.nbytes))
    for side in (pair.far, pair.near):
        side.stop(1)
    await pair.near.aclose()
    await pair.far.quiesce(1)
    pair.processes[1].cuda.drop(part.ends[1])
    assert [worker.health for worker in pair.workers] == ["ok", "ok"]
    assert not part.told and not pair.gpus.faults


async def test_a_stopped_peer_is_told_of_by_its_end(pair: NcclPair) -> None:
    part = Part(pair, 1)
    pair.far.receive(1, 0, part.ends[1], lambda _, error: part._notify("far", error))
    pair.near.abort()
    await until(lambda: bool(part.told))
    assert isinstance(part.told[0][1], PeerLost)


async def test_two_versions_of_nccl_are_refused_before_anything_is_opened() -> None:
    pair = NcclPair(FakeGpus(2), lambda _: None, lambda _: None)
    other = NcclPair(FakeGpus(2), lambda _: None, lambda _: None)
    other.processes[1].nccl.number = 23007
    old = pair.near.describe()
    newer = other.far._own.__class__(
        "other", 23007, pair.near._own.environment, b"token--9", 64
    )
    with pytest.raises(IncompatiblePeer) as caught:
        await pair.near.open(newer.encode(), pair.channels[0])
    assert caught.value.field == "nccl_version" and old
    await pair.aclose()
    await other.aclose()


async def test_nothing_moves_before_it_is_open() -> None:
    pair = NcclPair(FakeGpus(2), lambda _: None, lambda _: None)
    source = pair.memory(0, b"abc")
    with pytest.raises(LocalProtocolError, match="not open"):
        pair.near.send(1, 0, source, lambda digest, error: None)
    await pair.aclose()


@pytest.mark.parametrize(
    "frame",
    [
        Devices(b""),
        DeviceReady(),
        DeviceMet(0),
        PrepareDevice(),
        MeetDevice(0, b"short"),
        DeviceGrant(7),
        DeviceSkip(7),
        DeviceDone(7),
        DeviceOffer(0, 99, 0, 0, 10),
        DeviceOffer(5, 0, 0, 0, 10),
    ],
    ids=lambda frame: type(frame).__name__,
)
async def test_what_makes_no_sense_ends_the_transport(
    pair: NcclPair, frame: DeviceFrame
) -> None:
    pair.channels[1].send(frame)
    await until(lambda: bool(pair.lost[0]))
    assert type(pair.lost[0][0]) is RemoteProtocolError
