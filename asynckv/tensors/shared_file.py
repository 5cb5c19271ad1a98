"""A memory file that other processes may read: who owns it, and who maps it.

The one who maps it never trusts what it was told: the kernel says how large the
file is, that nobody can cut it, and that it was opened for reading only.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final, TypeAlias

import numpy
import numpy.typing
import torch

from asynckv.protocol.values import Place
from asynckv.protocol.wire import Digester
from asynckv.tensors.arena import Region
from asynckv.tensors.pages import ALIGNMENT_NBYTES
from asynckv.tensors.slabs import PAGE_NBYTES, Slabs
from asynckv.tensors.stitching import Claim, PrivatePages, stitch
from asynckv.tensors.views import dtype_of, empty_tensor, tensor_over
from asynckv.types import TensorSpec

__all__ = (
    "NONCE_NBYTES",
    "MappedFile",
    "SharedFile",
    "check_file",
    "check_place",
    "edges_of",
)

NONCE_NBYTES: Final = 16
_MAX_NBYTES: Final = 2**44
"""A larger file is refused: it would leave few addresses for anything else."""

_EDGE_NBYTES: Final = 4096

_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]


_BY_BYTES: Final = frozenset({"complex32"})
"""Of which torch warns when it is to make one at once."""

_NOTHING: Final[_Bytes] = numpy.empty(0, numpy.uint8)


class SharedFile:
    """The slabs of one arena, as others may have them: for reading.

    Its last page holds a ``nonce`` that only those know who have mapped it.

    :raises OSError: the process may have no more files
    """

    must_be_closed_there: ClassVar[bool] = False  # a mapping keeps its file
    exports_parts: ClassVar[bool] = False  # they go by lanes while the rest is made
    handle: ClassVar[bytes] = b""
    gpu_uuid: ClassVar[str] = ""

    def __init__(self, slabs: Slabs) -> None:
        self._fd = -1
        self.nbytes = slabs.file_nbytes
        self.memory = slabs.constant
        self.nonce = secrets.token_bytes(NONCE_NBYTES)
        os.pwrite(slabs.fileno(), self.nonce, slabs.max_bytes)
        # A duplicate would share the right to write.
        path = f"/proc/self/fd/{slabs.fileno()}"
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        self.close()

    def fileno(self) -> int:
        """Return a descriptor that can be sent. It is open until :meth:`close`."""
        return self._fd

    def drop(self) -> None:
        """The kernel does, with the last mapping."""

    def edges(self, regions: Sequence[Region], places: Sequence[Place | None]) -> bytes:
        """Return the digest of the first and last bytes of what lies there."""
        return edges_of(self.memory, places, [region.nbytes for region in regions])

    def close(self) -> None:
        """Send it to nobody any more. What others have mapped stays."""
        self.memory = _NOTHING
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class MappedFile:
    """Another process's memory file, mapped privately. Owns ``fd`` from here on.

    Whoever writes to a view of it changes that view alone. So each page is shown to
    one delivery at a time: :meth:`claim` says for which, and :meth:`release` drops
    what it has written. It is unmapped when the last view is gone, whatever was closed
    before.

    :raises ValueError: it is not what its owner should send
    :raises OSError: it cannot be mapped
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        self.memory = _NOTHING
        check_file(fd, nbytes)
        self.nbytes = nbytes
        self._pages: PrivatePages | None = PrivatePages(fd, nbytes)
        self.memory = self._pages.memory
        self._address: int = self.memory.ctypes.data

    def __del__(self) -> None:
        self.close()

    def fileno(self) -> int:
        """Return its descriptor, -1 if it is closed."""
        return self._fd

    def close(self) -> None:
        """Show no more of it. What there are views of stays mapped."""
        self.memory = _NOTHING
        pages, self._pages = getattr(self, "_pages", None), None
        if pages is not None:
            pages.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def nonce(self) -> bytes:
        """What the owner has written at the last page."""
        start = self.nbytes - PAGE_NBYTES
        return self.memory[start : start + NONCE_NBYTES].tobytes()

    def is_same_as(self, fd: int) -> bool:
        """Is that the file which is mapped here?"""
        ours, theirs = os.fstat(self._fd), os.fstat(fd)
        return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)

    def claim(self, places: Iterable[Place | None]) -> Claim | None:
        """Return the pages of one delivery, which show what the owner has there.

        ``None`` if another delivery here has some of them: :meth:`again` shows them.
        """
        if self._pages is None:
            return None
        return self._pages.claim(
            run for place in places if place is not None for run in place.runs
        )

    def release(self, claim: Claim) -> None:
        """Drop what was written to what was ``shown``. Called in any thread."""
        pages = self._pages
        if pages is not None:
            pages.release(claim)

    def again(self) -> MappedFile:
        """Map the same file once more, for one delivery. Needs no more descriptors.

        :raises OSError: it cannot be mapped, or is closed
        """
        return _MappedAgain(self)

    def lend(self, keeper: object) -> _Bytes:
        """Return the memory for :meth:`view`: views of it keep ``keeper`` alive."""
        window = _Window(self.memory, self._address, self.memory.nbytes, keeper)
        return numpy.asarray(window)

    def view(
        self, place: Place, spec: TensorSpec, nbytes: int, lent: _Bytes
    ) -> torch.Tensor:
        """Return a tensor where it lies in what was lent. It may be written.

        It has ``nbytes``, which whoever asks has counted already.

        ``place`` was checked.

        :raises OSError: pieces that lie apart cannot be mapped together
        """
        if not nbytes:
            return empty_tensor(spec)
        start = place.start
        if len(place.runs) == 1:
            start += place.runs[0][0]
        else:
            memory = stitch(self.fileno(), place.runs, writable=True, is_private=True)
            window = _Window(memory, memory.ctypes.data, memory.nbytes, lent)
            lent = numpy.asarray(window)
        if spec.dtype in _BY_BYTES:
            return tensor_over(lent[start:], spec)
        dtype, shape = dtype_of(spec.dtype), spec.shape
        count = nbytes // dtype.itemsize
        flat = torch.frombuffer(lent, dtype=dtype, count=count, offset=start)
        return flat if len(shape) == 1 else flat.view(shape)

    def pieces(self, place: Place, nbytes: int) -> list[_Bytes]:
        """Return the memory of one tensor as it lies. ``place`` was checked."""
        return _pieces(self.memory, place, 0, nbytes)


class _MappedAgain(MappedFile):
    """A file that is mapped already, for one delivery alone: it has no claims."""

    def __init__(self, first: MappedFile) -> None:
        self._fd = -1
        self._first = first
        self._pages = None
        self.nbytes = first.nbytes
        runs = [(0, self.nbytes)]
        self.memory = stitch(self.fileno(), runs, writable=True, is_private=True)
        self._address = self.memory.ctypes.data

    def fileno(self) -> int:
        return self._first.fileno()


class _Window:
    """What views are based on: its life is a hold on ``keeper``."""

    __slots__ = ("__array_interface__", "_keeper", "_memory")

    def __init__(
        self,
        memory: _Bytes,
        address: int,
        nbytes: int,
        keeper: object,
    ) -> None:
        self._memory = memory
        self._keeper = keeper
        self.__array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def check_place(place: Place, nbytes: int, file_nbytes: int) -> None:
    """Refuse a claim that a tensor of ``nbytes`` lies somewhere else than in a file.

    :raises ValueError: it does not, or not in whole pages
    """
    end = file_nbytes - PAGE_NBYTES
    room = 0
    for offset, length in place.runs:
        if offset % PAGE_NBYTES or length % PAGE_NBYTES or not length:
            raise ValueError("a tensor lies in no whole pages")
        if offset + length > end:
            raise ValueError(f"a tensor ends at {offset + length} of {end} bytes")
        room += length
    if place.start % ALIGNMENT_NBYTES:
        raise ValueError(f"a tensor lies at {place.start} bytes: not aligned")
    if place.start + nbytes > room:
        raise ValueError(f"a tensor of {nbytes} bytes lies in {room} bytes")


def edges_of(
    memory: _Bytes, places: Sequence[Place | None], sizes: Sequence[int]
) -> bytes:
    """Return one digest of the first and last bytes of some tensors in a file.

    Of those that lie there: not where the place is ``None``.
    """
    digester = Digester()
    update, view = digester.update, memory.data
    generations = [place.generation for place in places if place is not None]
    update(struct.pack(f"!{len(generations)}Q", *generations))
    for place, nbytes in zip(places, sizes, strict=True):
        if place is None:
            continue
        edge = min(nbytes, _EDGE_NBYTES)
        if len(place.runs) == 1:  # by far the most: there are many in an entry
            first = place.runs[0][0] + place.start
            end = first + nbytes
            update(view[first : first + edge])
            update(view[end - edge : end])
            continue
        for start in (0, nbytes - edge):
            for piece in _pieces(memory, place, start, edge):
                update(piece.data)
    return digester.digest()


def _pieces(memory: _Bytes, place: Place, start: int, nbytes: int) -> list[_Bytes]:
    start += place.start
    pieces = []
    for offset, length in place.runs:
        if start < length and nbytes:
            count = min(length - start, nbytes)
            pieces.append(memory[offset + start : offset + start + count])
            nbytes -= count
            start = 0
        else:
            start -= min(start, length)
    return pieces


def check_file(fd: int, nbytes: int) -> None:
    """Refuse a file that could be cut or grow, or be written, or is another one.

    :raises ValueError: it is one
    """
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as exc:
        raise ValueError("it is no memory file") from exc
    if seals & wanted != wanted:
        raise ValueError("it is not sealed")
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
        raise ValueError("it could be written")
    found = os.fstat(fd).st_size
    is_sound = PAGE_NBYTES < found <= _MAX_NBYTES and not found % PAGE_NBYTES
    if found != nbytes or not is_sound:
        raise ValueError(f"it has {found} bytes, not {nbytes}")
