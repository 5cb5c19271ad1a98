"""Moves the bytes of slots between a file and memory. In the tier's threads.

Straight from and to pages of memory where a file is open for direct I/O, so that
nothing of it is in memory twice, else by a buffer that the thread has. A value that is
written over another leaves, if the process dies in the middle, the header of one over
bytes of both, which that header's digest denies: so nothing is overwritten first.
"""

from __future__ import annotations

import collections
import errno
import mmap
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

import numpy

from asynckv.abc.tiers import TierMemory
from asynckv.stores.disk.calls import PAGE_NBYTES
from asynckv.stores.disk.directory import OpenSlotFile
from asynckv.stores.disk.slots import SlotHeader, pack_slot, unpack_slot

__all__ = (
    "BOUNCE_NBYTES",
    "Bounce",
    "Moved",
    "copy_body",
    "erase",
    "read_body",
    "read_header",
    "write",
)

Moved: TypeAlias = Callable[[int], None]
"""Told of bytes that were moved; raises to stop there."""

_MAX_RUNS: Final = 1024
"""IOV_MAX: so many pieces of memory in one call."""

_MAX_CALL_NBYTES: Final = 4 * 2**20
"""More is several calls, so that somebody sees it go on, and can stop it."""

BOUNCE_NBYTES: Final = 2**20 + 2 * PAGE_NBYTES


class Bounce:
    """Memory of one thread that direct I/O may use."""

    def __init__(self) -> None:
        memory = memoryview(mmap.mmap(-1, BOUNCE_NBYTES))
        self.head = memory[:PAGE_NBYTES]
        self.tail = memory[PAGE_NBYTES : 2 * PAGE_NBYTES]
        self.space = memory[2 * PAGE_NBYTES :]


def read_header(file: OpenSlotFile, slot: int, space: memoryview) -> SlotHeader | None:
    """Fill ``space`` with what the slot begins with; return what it says that it has.

    ``None``: nothing that can be believed.

    :raises OSError: it cannot be read
    """
    for _ in range(2):  # what is wrong has to be so twice
        _move(file, file.calls.preadv, [space], slot * file.slot_nbytes, _nobody)
        header = unpack_slot(space[:PAGE_NBYTES])
        if header is not None and (header.file, header.slot) == (file.number, slot):
            return header
    return None


def copy_body(space: memoryview, memory: TierMemory) -> None:
    """Copy the value from what :func:`read_header` has read."""
    _spread(space[PAGE_NBYTES : PAGE_NBYTES + memory.nbytes], memory.pieces)


def read_body(
    file: OpenSlotFile, slot: int, memory: TierMemory, bounce: Bounce, moved: Moved
) -> None:
    """Fill the memory with the value in a slot.

    :raises OSError: it cannot be read
    """
    offset = slot * file.slot_nbytes + PAGE_NBYTES
    if not file.is_direct or memory.pages:
        whole = memory.pages if file.is_direct else memory.pieces
        _move(file, file.calls.preadv, whole, offset, moved)
        return
    pieces = collections.deque(memory.pieces)
    left = memory.nbytes
    while left:
        some = min(left, len(bounce.space))
        space = bounce.space[: _padded(some)]
        _move(file, file.calls.preadv, [space], offset, moved)
        _spread(space[:some], _take(pieces, some))
        offset += len(space)
        left -= some


def write(
    file: OpenSlotFile,
    header: SlotHeader,
    memory: TierMemory,
    bounce: Bounce,
    moved: Moved,
) -> None:
    """Write a slot: its header, and the value in ``memory``.

    :raises OSError: it cannot be written
    """
    pack_slot(header, bounce.head)
    offset = header.slot * file.slot_nbytes
    surplus = memory.nbytes % PAGE_NBYTES
    pieces = collections.deque(memory.pieces)
    if not file.is_direct or memory.pages or not memory.nbytes:
        whole = _take(pieces, memory.nbytes - surplus, at_most=None)
        if surplus:  # what is behind it in its page is not ours to write
            _join(pieces, bounce.tail)
            whole.append(bounce.tail)
        _move(file, file.calls.pwritev, [bounce.head, *whole], offset, moved)
        return
    left = memory.nbytes
    head = [bounce.head]
    while left:
        some = min(left, len(bounce.space))
        space = bounce.space[: _padded(some)]
        _join(_take(pieces, some, at_most=None), space)
        _move(file, file.calls.pwritev, [*head, space], offset, moved)
        offset += len(space) + len(head) * PAGE_NBYTES
        left -= some
        head = []


def erase(file: OpenSlotFile, slot: int, bounce: Bounce) -> None:
    """Overwrite the header of a slot, so that nobody finds its value again.

    :raises OSError: it cannot be written
    """
    bounce.head[:] = bytes(PAGE_NBYTES)
    _move(file, file.calls.pwritev, [bounce.head], slot * file.slot_nbytes, _nobody)


def _move(
    file: OpenSlotFile,
    call: Callable[[int, list[memoryview], int], int],
    buffers: Iterable[memoryview],
    offset: int,
    moved: Moved,
) -> None:
    """Read or write all of the buffers, in as many calls as it takes."""
    left = collections.deque(buffers)
    # Direct I/O goes on at a page, whatever a call has done.
    unit = PAGE_NBYTES if file.is_direct else 1
    while left:
        run = _take(left, _MAX_CALL_NBYTES)
        wanted = sum(map(len, run))
        if not wanted:
            continue
        done = call(file.fd, run, offset)
        if done < wanted:
            done -= done % unit
            left.extendleft(reversed(run))
            _take(left, done, at_most=None)
        if done <= 0:
            raise OSError(errno.EIO, "the file ends too early, or takes no more")
        offset += done
        moved(done)


def _take(
    pieces: collections.deque[memoryview],
    nbytes: int,
    at_most: int | None = _MAX_RUNS,
) -> list[memoryview]:
    """Take the first ``nbytes``, of so many pieces at most."""
    taken: list[memoryview] = []
    while pieces and nbytes and (at_most is None or len(taken) < at_most):
        piece = pieces.popleft()
        if len(piece) > nbytes:
            pieces.appendleft(piece[nbytes:])
            piece = piece[:nbytes]
        nbytes -= len(piece)
        taken.append(piece)
    return taken


def _join(pieces: Iterable[memoryview], target: memoryview) -> None:
    """Copy pieces one behind the other, and zeros behind them."""
    done = 0
    for piece in pieces:
        _copy(piece, target[done : done + len(piece)])
        done += len(piece)
    if done < len(target):
        target[done:] = bytes(len(target) - done)


def _spread(source: memoryview, pieces: Iterable[memoryview]) -> None:
    done = 0
    for piece in pieces:
        _copy(source[done : done + len(piece)], piece)
        done += len(piece)


def _copy(source: memoryview, target: memoryview) -> None:
    # numpy lets the GIL go where a slice assignment keeps it.
    numpy.copyto(
        numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8)
    )


def _padded(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def _nobody(nbytes: int) -> None:
    """Nobody counts it."""
