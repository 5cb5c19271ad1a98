from __future__ import annotations

import sys

import pytest

from asynckv.devices.cupy import CupyStream
from asynckv.errors import GPUFailed, GPUUnavailable
from asynckv.transports.nccl.api import (
    UNIQUE_ID_NBYTES,
    Comm,
    CupyNccl,
    NcclApi,
    open_nccl,
)
from harness.cupy_double import CupyDouble, NcclError


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
