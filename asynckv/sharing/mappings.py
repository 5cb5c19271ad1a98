"""A peer's memory that this process reads where it lies, and what it has of it.

Each delivery is a :class:`MappedPin`, which lives as long as a view of it does. Its
end is told by a socket of its own, from whatever thread it comes in, also when the
link, or the loop, is long gone. A pipe's file (:class:`PeerFile`) is copied out of
alone: the end of its connection tells the peer that its memory is its own again.

What the peer says of a place is checked before anything is read there.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import queue
import socket
import struct
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, TypeAlias

import numpy
import numpy.typing

from asynckv.affinity import ProcessBound, watch_forks
from asynckv.devices.imports import in_thread, set_done
from asynckv.errors import PeerLost, RemoteProtocolError
from asynckv.links.fd_socket import fetch_file, hang_up
from asynckv.protocol.handshake import DigestMode
from asynckv.protocol.transfer_frames import Exposed
from asynckv.protocol.values import Place
from asynckv.tensors.shared_file import (
    NONCE_NBYTES,
    MappedFile,
    check_file,
    check_place,
    edges_of,
)
from asynckv.tensors.slabs import PAGE_NBYTES
from asynckv.tensors.stitching import Claim, stitch

__all__ = (
    "PIN_NUMBER",
    "MappedMemory",
    "MappedPin",
    "PeerFile",
    "edges_at",
    "import_file",
)

_LOOKED_AT_ONCE_NBYTES: Final = 4 * 2**20
"""What takes a tenth of a millisecond to look through; a thread does with more."""

PIN_NUMBER: Final = struct.Struct("!Q")
"""What a released pin is told by, one after another."""


class MappedPin:
    """One delivery's memory: the owner's to use again when this is gone."""

    __slots__ = ("_memory", "claim", "number")

    def __init__(self, memory: MappedMemory, number: int) -> None:
        self._memory = memory
        self.number = number
        self.claim: Claim | None = None
        """The pages of the kept mapping that it has, if it has some."""

    def __del__(self) -> None:
        self._memory.release(self.number, self.claim)


class MappedMemory(ProcessBound):
    """What one link shows of its peer's memory. It outlives the link.

    ``digest`` says what is compared of each delivery.
    """

    def __init__(
        self, sock: socket.socket, file: MappedFile, digest: DigestMode
    ) -> None:
        self._own()
        self.file = file
        self.digest: DigestMode = digest
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._last_number = 0
        self._live: set[int] = set()
        self._kept: set[int] = set()
        self._unsent: collections.deque[int] = collections.deque()
        self._ended: queue.SimpleQueue[tuple[int, Claim | None, bool]] = (
            queue.SimpleQueue()
        )
        self._is_releasing = False
        self._is_link_over = False
        watch_forks(self)

    def __del__(self) -> None:
        self._sock.close()

    @property
    def pins(self) -> int:
        """Of how many deliveries there are views."""
        return len(self._live)

    def take(self, number: int) -> MappedPin:
        """The peer has offered memory under that number.

        :raises RemoteProtocolError: it was offered before
        """
        if number <= self._last_number:
            raise RemoteProtocolError(f"pin {number} after pin {self._last_number}")
        self._last_number = number
        self._live.add(number)
        return MappedPin(self, number)

    def release(self, number: int, claim: Claim | None = None) -> None:
        """The last view of it is gone. Called by finalizers: in any thread.

        What was written to it is dropped before the peer hears of it.
        """
        if self._is_copy:
            return
        # Now: no child that is forked while that takes its time has a view.
        work = number, claim, number in self._kept
        if claim is None or claim.exported_nbytes <= _LOOKED_AT_ONCE_NBYTES:
            self._release(*work)
            return
        self._ended.put(work)
        if self._is_releasing:
            return
        self._is_releasing = True
        in_thread(self._release_all)

    def _release_all(self) -> None:
        """End what has much to look through. The thread ends when nothing is left."""
        while not self._ended.empty():
            try:
                while True:
                    self._release(*self._ended.get_nowait())
            except queue.Empty:
                pass
            finally:
                self._is_releasing = False  # what comes now starts another thread

    def _release(self, number: int, claim: Claim | None, is_kept: bool) -> None:
        if claim is not None:
            self.file.release(claim)
        if not is_kept:
            self._notify(number)
        self._live.discard(number)
        self._close_if_over()

    def closing(self) -> asyncio.Future[None] | None:
        """Return what is done when it is closed, if the peer is to wait for that."""
        return None  # the kernel does it

    def link_over(self) -> None:
        """Nothing more is offered. The kernel tells the peer when all is let go."""
        self._is_link_over = True
        self._close_if_over()

    def keep_for_child(self) -> None:
        """A child will have the views of now too: only its own end lets them go."""
        self._kept |= self._live.copy()

    def _notify(self, number: int) -> None:
        try:
            self._sock.send(PIN_NUMBER.pack(number))
        except BlockingIOError:
            self._unsent.append(number)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._tell_later)
        except OSError:  # the peer is gone, and its memory is ours alone
            pass

    def _tell_later(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_writer(self._sock, self._tell_unsent)

    def _tell_unsent(self) -> None:
        self._loop.remove_writer(self._sock)
        for _ in range(len(self._unsent)):
            self._notify(self._unsent.popleft())

    def _close_if_over(self) -> None:
        # What was not told is told by the end of the connection.
        if self._is_link_over and not self._live:
            if self._unsent:
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._close)
            else:
                self._hang_up()

    def _close(self) -> None:
        if self._sock.fileno() >= 0:  # two threads may have let the last two go
            self._loop.remove_writer(self._sock)
            self._hang_up()

    def _hang_up(self) -> None:
        """The peer hears that nothing of its memory is used here. In any thread."""
        self._sock.close()


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
