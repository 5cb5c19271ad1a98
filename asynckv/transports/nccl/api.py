"""What asynckv asks of NCCL: sends and receives of bytes, on one thread a GPU.

Protocols only: :mod:`asynckv.transports.nccl.nccl_cupy` is them over CuPy, and
the fakes of tests/harness without a GPU. Everything here may block the thread
that calls it, for ever where the peer does not answer; all calls for one GPU come
from one thread, and so does the abort that ends what will never end. A call that
NCCL refuses raises :exc:`~asynckv.errors.GPUFailed`.
"""

from __future__ import annotations

from typing import Final, Protocol, runtime_checkable

from asynckv.tensors.cuda import Stream

__all__ = ("UNIQUE_ID_NBYTES", "Comm", "NcclApi")

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
