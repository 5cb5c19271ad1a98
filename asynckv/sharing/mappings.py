"""A peer's memory that this process reads where it lies, and what it has of it.

Each delivery is a :class:`MappedPin`, which lives as long as a view of it does. Its
end is told by a socket of its own, from whatever thread it comes in, also when the
link, or the loop, is long gone.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import queue
import socket
import struct
import threading
from typing import Final

from asynckv.errors import RemoteProtocolError
from asynckv.processes import ProcessBound, watch_forks
from asynckv.protocol.handshake import DigestMode
from asynckv.tensors.shared_file import MappedFile
from asynckv.tensors.stitching import Claim

__all__ = ("PIN_NUMBER", "MappedMemory", "MappedPin")

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
        try:
            threading.Thread(target=self._release_all, name="asynckv-release").start()
        except RuntimeError:  # there are no more, or the interpreter ends
            self._release_all()

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
