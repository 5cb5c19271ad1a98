from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest

from asynckv.devices.cupy import CupyStream
from asynckv.errors import (
    GPUFailed,
    GPUUnavailable,
    IncompatiblePeer,
    RemoteProtocolError,
)
from asynckv.protocol.transfer_frames import MeetDevice, PrepareDevice
from asynckv.transports.nccl.api import (
    UNIQUE_ID_NBYTES,
    Comm,
    CupyNccl,
    NcclApi,
    open_nccl,
)
from asynckv.transports.nccl.connecting import (
    DeviceDescription,
    check_peer,
    nccl_environment_digest,
)
from harness.cupy_double import CupyDouble, NcclError
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


def test_the_adapter_fits_the_seam() -> None:
    nccl: NcclApi = CupyNccl(CupyDouble().nccl)
    comm: Comm = nccl.open_comm(2, bytes(UNIQUE_ID_NBYTES), 0)
    comm.destroy()


def install(monkeypatch: pytest.MonkeyPatch, cupy: CupyDouble | None) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", cupy and cupy.nccl)


def test_without_cupy_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    with pytest.raises(GPUUnavailable, match="CuPy is not installed"):
        open_nccl()


def test_without_nccl_it_says_which_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, CupyDouble(has_nccl=False))
    with pytest.raises(GPUUnavailable, match="no NCCL library") as caught:
        open_nccl()
    assert caught.value.hint == "python -m pip install nvidia-nccl-cu12"


def test_an_old_cupy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = CupyDouble()
    old.__version__ = "13.6.0"
    install(monkeypatch, old)
    with pytest.raises(GPUUnavailable, match=r"13\.6\.0 is too old"):
        open_nccl()


def test_bytes_are_sent_and_received_as_uint8(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, cupy := CupyDouble())
    comm = open_nccl().open_comm(2, b"i" * 128, 1)
    stream = CupyStream(cupy.runtime, 7)
    comm.send(4096, 10, 0, stream)
    comm.receive(8192, 20, 0, stream)
    assert cupy.calls[-2:] == [("send", 4096, 10, 1, 0, 7), ("recv", 8192, 20, 1, 0, 7)]


def test_what_nccl_refuses_is_an_error_of_ours() -> None:
    cupy = CupyDouble()
    cupy.answers["groupEnd"] = NcclError(5)
    with pytest.raises(GPUFailed, match="INVALID_USAGE") as caught:
        CupyNccl(cupy.nccl).group_end()
    assert caught.value.code == 5


def test_a_code_that_cupy_has_no_name_for_is_an_error_of_ours() -> None:
    cupy = CupyDouble()
    cupy.answers["check_async_error"] = KeyError(7)
    comm = CupyNccl(cupy.nccl).open_comm(2, bytes(128), 0)
    with pytest.raises(GPUFailed, match="NCCL error 7") as caught:
        comm.check_async_error()
    assert caught.value.code == 7


def test_a_unique_id_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="3 bytes"):
        CupyNccl(CupyDouble().nccl).open_comm(2, b"abc", 0)
