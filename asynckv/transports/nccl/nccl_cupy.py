"""NCCL by CuPy's bindings.

Imported by :func:`open_nccl` and by nothing else. CuPy's table of errors ends at 6:
what NCCL calls 7 and 8 (in progress, timeout) comes as a ``KeyError``. Its communicator
is destroyed where it is collected, which may block: who opened it keeps it until it was
aborted or destroyed.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any, Final

from asynckv.errors import GPUFailed, GPUUnavailable
from asynckv.tensors.cuda import Stream
from asynckv.tensors.cuda_cupy import import_cupy
from asynckv.transports.nccl.api import UNIQUE_ID_NBYTES, NcclApi

__all__ = ("CupyComm", "CupyNccl", "open_nccl")

_UINT8: Final = 1


def open_nccl() -> NcclApi:
    """Return NCCL by CuPy. Imports it, so not on an event loop.

    :raises GPUUnavailable: CuPy or the NCCL library is missing, or CuPy is too old
    """
    cupy = import_cupy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it has no NCCL: so do we
        nccl = importlib.import_module("cupy.cuda.nccl")
    major = int(cupy.cuda.runtime.runtimeGetVersion()) // 1000
    if not nccl.available:
        raise GPUUnavailable(
            "CuPy finds no NCCL library",
            hint=f"python -m pip install nvidia-nccl-cu{major}",
        )
    if int(str(cupy.__version__).split(".")[0]) < 14:
        raise GPUUnavailable(
            f"CuPy {cupy.__version__} is too old",
            hint=f'python -m pip install "cupy-cuda{major}x>=14"',
        )
    return CupyNccl(nccl)


@contextlib.contextmanager
def _mapped(nccl: Any, doing: str) -> Iterator[None]:
    """Let what CuPy raises of NCCL leave as an error of asynckv."""
    try:
        yield
    except nccl.NcclError as exc:
        raise GPUFailed(f"{doing}: {exc}", code=int(exc.status)) from exc
    except KeyError as exc:
        code = exc.args[0] if exc.args and isinstance(exc.args[0], int) else 0
        raise GPUFailed(f"{doing}: NCCL error {code}", code=code) from exc


class CupyComm:
    """A communicator. One thread's, from the first call to the last."""

    def __init__(self, nccl: Any, comm: Any) -> None:
        self._nccl = nccl
        self._comm = comm

    def send(self, address: int, nbytes: int, peer: int, stream: Stream) -> None:
        with _mapped(self._nccl, f"send {nbytes} bytes"):
            self._comm.send(address, nbytes, _UINT8, peer, stream.handle)

    def receive(self, address: int, nbytes: int, peer: int, stream: Stream) -> None:
        with _mapped(self._nccl, f"receive {nbytes} bytes"):
            self._comm.recv(address, nbytes, _UINT8, peer, stream.handle)

    def check_async_error(self) -> None:
        with _mapped(self._nccl, "look for an error"):
            self._comm.check_async_error()

    def abort(self) -> None:
        with _mapped(self._nccl, "abort"):
            self._comm.abort()

    def destroy(self) -> None:
        with _mapped(self._nccl, "destroy"):
            self._comm.destroy()


class CupyNccl:
    """:class:`~asynckv.transports.nccl.api.NcclApi` over ``cupy.cuda.nccl``."""

    def __init__(self, nccl: Any) -> None:
        self._nccl = nccl

    def version(self) -> int:
        with _mapped(self._nccl, "ask for the version"):
            return int(self._nccl.get_version())

    def unique_id(self) -> bytes:
        with _mapped(self._nccl, "make a unique id"):
            return bytes(self._nccl.get_unique_id())

    def open_comm(self, ranks: int, unique_id: bytes, rank: int) -> CupyComm:
        if len(unique_id) != UNIQUE_ID_NBYTES:
            raise ValueError(f"a unique id of {len(unique_id)} bytes")
        with _mapped(self._nccl, "open a communicator"):
            comm = self._nccl.NcclCommunicator(ranks, unique_id, rank)
        return CupyComm(self._nccl, comm)

    def group_start(self) -> None:
        with _mapped(self._nccl, "begin a group"):
            self._nccl.groupStart()

    def group_end(self) -> None:
        with _mapped(self._nccl, "end a group"):
            self._nccl.groupEnd()
