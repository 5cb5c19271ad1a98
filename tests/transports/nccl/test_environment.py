from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asynckv.errors import IncompatiblePeer, RemoteProtocolError
from asynckv.transports.nccl.connecting import (
    DeviceDescription,
    check_peer,
    nccl_environment_digest,
)

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
