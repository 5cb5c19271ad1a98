"""What asynckv asks of NCCL, and that by CuPy's bindings: sends and receives of bytes.

Everything here may block the thread that calls it, for ever where the peer does not
answer; all calls for one GPU come from one thread, and so does the abort that ends what
will never end. A call that NCCL refuses raises :exc:`~asynckv.errors.GPUFailed`. CuPy's
table of errors ends at 6: what NCCL calls 7 and 8 (in progress, timeout) comes as a
``KeyError``. Its communicator is destroyed where it is collected, which may block: who
opened it keeps it until it was aborted or destroyed.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any, Final, Protocol, runtime_checkable

from asynckv.devices.cuda import Stream
from asynckv.devices.cupy import import_cupy
from asynckv.errors import GPUFailed, GPUUnavailable

__all__ = (
    "UNIQUE_ID_NBYTES",
    "Comm",
    "CupyComm",
    "CupyNccl",
    "NcclApi",
    "open_nccl",
)


UNIQUE_ID_NBYTES: Final = 128


class Comm(Protocol):
    """One communicator: a sequence of operations that all its ranks agree on.

    No two threads may be in it at once, nor in two of one GPU.
    """

    def send(self, address: int, nbytes: int, peer: int, stream: Stream) -> None:
        """Queue bytes to ``peer``, as uint8. The first one waits for the peer.

        What is received there must have as many bytes: nobody checks.
        """

    def receive(self, address: int, nbytes: int, peer: int, stream: Stream) -> None:
        """Queue bytes from ``peer``, as uint8. The first one waits for the peer."""

    def check_async_error(self) -> None:
        """Tell what has gone wrong since, if anything.

        :raises GPUFailed: an operation failed, and so will all others
        """

    def abort(self) -> None:
        """End now: what is on its way ends too, its bytes undefined. Once is enough."""

    def destroy(self) -> None:
        """End cleanly, after the last operation; else it waits for it."""


@runtime_checkable
class NcclApi(Protocol):
    """NCCL itself, on the GPU that this thread uses."""

    def version(self) -> int:
        """As NCCL numbers it: 22809 is 2.28.9. Both sides need the same."""

    def unique_id(self) -> bytes:
        """Make a secret of 128 bytes for one communicator.

        Each one keeps a thread and a listening socket: one an opening, no more.
        """

    def open_comm(self, ranks: int, unique_id: bytes, rank: int) -> Comm:
        """Make a communicator. Waits until all of its ranks do."""

    def group_start(self) -> None:
        """What is queued from here on begins together. Of this thread alone."""

    def group_end(self) -> None:
        """End a group; here the first operations of a pair wait for the peer."""


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
