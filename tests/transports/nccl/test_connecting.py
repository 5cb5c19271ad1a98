from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asynckv.errors import IncompatiblePeer, RemoteProtocolError
from asynckv.protocol.transfer_frames import MeetDevice, PrepareDevice
from asynckv.transports.nccl.connecting import (
    DeviceDescription,
    check_peer,
    nccl_environment_digest,
)
from harness.nccl_pairs import NcclPair

OURS = DeviceDescription("gpu-1", 22809, b"e" * 16, b"token--1", 4096)
THEIRS = DeviceDescription("gpu-2", 22809, b"e" * 16, b"token--2", 8192)


def test_a_description_survives_the_wire() -> None:
    assert DeviceDescription.decode(OURS.encode()) == OURS


@pytest.mark.parametrize("data", [b"", b"\xc0", OURS.encode()[:-1]])
def test_what_is_no_description_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="no description"):
        DeviceDescription.decode(data)


def test_two_gpus_with_the_same_nccl_go_together() -> None:
    check_peer(OURS, THEIRS)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"nccl_version": 22901}, "nccl_version"),
        ({"environment": b"f" * 16}, "nccl_environment"),
        ({"uuid": "gpu-1"}, "gpu"),
        ({"token": b"token--1"}, "token"),
    ],
)
def test_what_would_hang_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(IncompatiblePeer) as caught:
        check_peer(OURS, msgspec.structs.replace(THEIRS, **change))
    assert caught.value.field == field


def test_variables_that_decide_how_peers_talk_are_compared() -> None:
    plain = nccl_environment_digest({"PATH": "a"})
    assert plain == nccl_environment_digest({})
    changed = [{"NCCL_PROTO": "LL"}, {"NCCL_PROTO": "Simple"}, {"NCCL_NET": "IB"}]
    digests = {nccl_environment_digest(environment) for environment in changed}
    assert len(digests | {plain}) == 4


@pytest.mark.parametrize(
    "name",
    [
        "NCCL_CUMEM_ENABLE",
        "NCCL_DEBUG",
        "NCCL_HOSTID",
        "NCCL_IB_GID_INDEX",
        "NCCL_IB_HCA",
        "NCCL_NET_GDR_LEVEL",
        "NCCL_SOCKET_IFNAME",
        "NCCL_TOPO_FILE",
    ],
)
def test_what_a_host_or_an_engine_has_of_its_own_is_not(name: str) -> None:
    assert nccl_environment_digest({name: "1"}) == nccl_environment_digest({})


def test_the_refusal_names_the_variables() -> None:
    with pytest.raises(IncompatiblePeer) as caught:
        check_peer(OURS, msgspec.structs.replace(THEIRS, environment=b"f" * 16))
    assert "NCCL_PROTO" in caught.value.hint


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
