"""A peer's memory file that is mapped here to be copied out of, and never written.

Rule of this file: what the peer says of a place is checked before anything is read
there. The connection by which the file came is open for as long as anything is read:
its end tells the peer that its memory is its own again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, TypeAlias

import numpy
import numpy.typing

from asynckv.devices.imports import in_thread, set_done
from asynckv.errors import PeerLost, RemoteProtocolError
from asynckv.links.fd_socket import fetch_file, hang_up
from asynckv.processes import ProcessBound
from asynckv.protocol.transfer_frames import Exposed
from asynckv.protocol.values import Place
from asynckv.tensors.shared_file import (
    NONCE_NBYTES,
    check_file,
    check_place,
    edges_of,
)
from asynckv.tensors.slabs import PAGE_NBYTES
from asynckv.tensors.stitching import stitch

__all__ = ("PeerFile", "edges_at", "import_file")

_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]

_CLOSE_S: Final = 2.0

_MAX_REMEMBERED: Final = 2**16
"""Of so many places a peer may not say again what it has said of them."""


def edges_at(memory: _Bytes, generation: int) -> bytes:
    """Return one digest of the generation and of the first and last bytes."""
    nbytes = memory.nbytes
    return edges_of(memory, [Place(((0, nbytes),), 0, generation)], [nbytes])


async def import_file(exposed: Exposed) -> PeerFile:
    """Map what a peer shows. A cancelled call leaves nothing behind.

    :raises PeerLost: nobody is where the ticket is good, or hung up
    :raises AuthError: that is another user's
    :raises ValueError: it is no file that a peer should send
    :raises OSError: it cannot be mapped
    """
    sock, fd = await fetch_file(exposed.address, exposed.ticket)
    try:
        return PeerFile(sock, fd, exposed.nbytes)
    except BaseException:
        sock.close()
        os.close(fd)
        raise


class PeerFile(ProcessBound):
    """Owns ``sock`` and ``fd``, unless it raises, until :meth:`close`.

    :raises ValueError: it is no file that a peer should send
    :raises OSError: it cannot be mapped
    """

    def __init__(self, sock: socket.socket, fd: int, nbytes: int) -> None:
        self._own()
        check_file(fd, nbytes)
        self.nbytes = nbytes
        self._memory: _Bytes | None = stitch(fd, [(0, nbytes)], writable=False)
        self._sock, self._fd = sock, fd
        self._claimed: list[tuple[int, int]] = []
        """Where each run begins and ends, in order: none reaches into another one."""
        self._generations: dict[int, int] = {}
        self._reads = 0
        self._is_over = False
        self._closed = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        """May more be read there?"""
        return not self._is_over

    @property
    def nonce(self) -> bytes:
        """What the peer has written at the last page."""
        if self._memory is None:
            raise PeerLost("the peer's memory is closed")
        start = self.nbytes - PAGE_NBYTES
        return self._memory[start : start + NONCE_NBYTES].tobytes()

    def claim(self, place: Place, nbytes: int) -> None:
        """The peer says that a tensor lies there, until :meth:`release`.

        :raises RemoteProtocolError: it does not lie in the file, another one lies
            there, or it was there before
        """
        try:
            check_place(place, nbytes, self.nbytes)
        except ValueError as exc:
            raise RemoteProtocolError(f"a push of {exc}") from exc
        first = place.runs[0][0]
        if place.generation <= self._generations.get(first, -1):
            raise RemoteProtocolError("a tensor that lies where it was shown before")
        for start, length in place.runs:
            end = start + length
            index = bisect_left(self._claimed, (start, end))
            beside = self._claimed[max(index - 1, 0) : index + 1]
            if any(start < other_end and other < end for other, other_end in beside):
                raise RemoteProtocolError("a tensor that lies where another one does")
            self._claimed.insert(index, (start, end))
        if len(self._generations) >= _MAX_REMEMBERED:
            self._generations.clear()
        self._generations[first] = place.generation

    def release(self, place: Place) -> None:
        """What lies there is not read any more: something else may. Twice is once."""
        for start, length in place.runs:
            run = start, start + length
            index = bisect_left(self._claimed, run)
            if self._claimed[index : index + 1] == [run]:
                del self._claimed[index]

    @contextlib.contextmanager
    def reading(self, place: Place, nbytes: int) -> Iterator[_Bytes]:
        """Show a tensor that was claimed, in one piece, for as long as the block is.

        Who writes there crashes.

        :raises PeerLost: the file is closed
        :raises OSError: pieces that lie apart cannot be mapped together
        """
        if self._is_over or self._memory is None:
            raise PeerLost("the peer's memory is closed")
        self._reads += 1
        try:
            start, memory = place.start, self._memory
            if len(place.runs) == 1:
                start += place.runs[0][0]
            else:
                memory = stitch(self._fd, place.runs, writable=False)
            yield memory[start : start + nbytes]
        finally:
            self._reads -= 1
            self._close_if_over()

    def close(self) -> None:
        """Close it when nothing is read. Never waits.

        Nothing in a forked child: the peer would take that for the parent's end.
        """
        if self._is_copy:
            return
        self._is_over = True
        self._close_if_over()

    async def wait_closed(self) -> None:
        """After :meth:`close`: wait until it is closed, 2 s at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.wait({self._closed})

    def _close_if_over(self) -> None:
        if not self._is_over or self._reads or self._memory is None:
            return
        memories, self._memory = [self._memory], None

        def close() -> None:
            memories.clear()  # the kernel takes its time
            hang_up(self._sock)
            os.close(self._fd)
            set_done(self._closed)

        in_thread(close)
