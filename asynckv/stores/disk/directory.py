"""The directory that a disk tier has alone: its lock, and its files of slots.

``lock`` is locked, and says how often the directory was opened: what is written later
has a greater sequence, whatever the clock says. ``000007-513.slots`` is the file 7, of
slots of 513 pages: as many as it is long. Nothing else is touched. In the tier's
threads.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
from pathlib import Path
from typing import Final

from asynckv.errors import ConfigError
from asynckv.stores.disk.calls import PAGE_NBYTES, FileCalls

__all__ = ("NO_ROOM", "OpenSlotFile", "SlotDirectory")

logger = logging.getLogger(__name__)

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_NAME: Final = re.compile(r"(\d{6,9})-([1-9]\d{0,8})\.slots")
_COUNT_NBYTES: Final = 8
_MOST_OPENED: Final = 2**22
_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


class OpenSlotFile:
    """A file of ``count`` slots of ``pages`` pages each."""

    def __init__(
        self, calls: FileCalls, path: Path, fd: int, number: int, pages: int
    ) -> None:
        self.path = path
        self.fd = fd
        self.number = number
        self.pages = pages
        self.slot_nbytes = pages * PAGE_NBYTES
        self.count = 0
        self.is_direct = False
        self.calls = calls

    def close(self) -> None:
        """Close it: nobody may be reading or writing there."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class SlotDirectory:
    """Files of slots, of at most ``max_bytes`` when it is opened."""

    def __init__(self, path: Path, max_bytes: int, calls: FileCalls) -> None:
        self.path = path
        self.is_direct = True
        self.files: dict[int, OpenSlotFile] = {}
        self._max_bytes = max_bytes
        self._calls = calls
        self._lock_fd = -1
        self._next_number = 0
        self._numbers = threading.Lock()

    def open(self) -> int:
        """Lock it and open what is there; return how often it was opened before.

        :raises ConfigError: somebody else has it, or it can be nobody's
        :raises OSError: it cannot be read
        """
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            self._lock_fd = self._calls.open(f"{self.path}/lock", is_direct=False)
        except (FileExistsError, NotADirectoryError, PermissionError) as exc:
            hint = "name a directory that this user may write to"
            raise ConfigError(
                f"no directory for a disk tier: {exc}", hint=hint
            ) from exc
        try:
            self._calls.lock(self._lock_fd)
            opened = self._count_up()
            self._open_files()
        except BlockingIOError as exc:
            self.close()
            hint = "one process has it; others come to that one by a server"
            raise ConfigError(f"{self.path} is in use", hint=hint) from exc
        except BaseException:
            self.close()
            raise
        return opened

    def close(self) -> None:
        """Close everything: nobody may be at work here."""
        for file in self.files.values():
            file.close()
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            self._calls.unlock(fd)
            os.close(fd)

    def create(self, pages: int, count: int) -> OpenSlotFile:
        """Make a file of so many slots, or of as many as the disk has room for.

        :raises OSError: it has room for none, or something is wrong with it
        """
        with self._numbers:
            number = self._next_number
            self._next_number += 1
        file = self._open_file(self.path / f"{number:06d}-{pages}.slots", number, pages)
        try:
            file.count = self._allocate(file, count)
        except BaseException:
            self._drop(file)
            raise
        self.files[number] = file
        return file

    def remove(self, number: int) -> None:
        """Give a file's room back: nobody may be at work there.

        :raises OSError: it is still there
        """
        self._drop(self.files.pop(number))

    def look(self) -> None:
        """See if it is still there, and can be read.

        :raises OSError: it is not, or cannot
        """
        os.stat(self.path)
        os.pread(self._lock_fd, _COUNT_NBYTES, 0)

    def _count_up(self) -> int:
        opened = int.from_bytes(os.pread(self._lock_fd, _COUNT_NBYTES, 0), "little")
        if opened > _MOST_OPENED:  # somebody else wrote that: as if it was lost
            opened = 0
        count = (opened + 1).to_bytes(_COUNT_NBYTES, "little")
        os.pwrite(self._lock_fd, count, 0)
        return opened

    def _open_files(self) -> None:
        left = self._max_bytes
        for name in sorted(os.listdir(self.path)):
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            number, pages = int(match[1]), int(match[2])
            self._next_number = max(self._next_number, number + 1)
            file = self._open_file(self.path / name, number, pages)
            if number in self.files:  # two have made it: the lock was taken away
                self._drop(file)
                continue
            self.files[number] = file
            nbytes = os.fstat(file.fd).st_size
            file.count = nbytes // file.slot_nbytes
            left -= nbytes
            if not file.count or left < 0:  # cut to nothing, or the bound is less now
                left += nbytes
                self.remove(number)

    def _open_file(self, path: Path, number: int, pages: int) -> OpenSlotFile:
        fd = -1
        if self.is_direct:
            try:
                fd = self._open_direct(path)
            except OSError as exc:
                if exc.errno not in _REFUSED:
                    raise
                self.is_direct = False
                logger.warning(
                    "%s takes no direct I/O: the system keeps copies of what is there",
                    self.path,
                )
        if fd < 0:
            fd = self._calls.open(str(path), is_direct=False)
        file = OpenSlotFile(self._calls, path, fd, number, pages)
        file.is_direct = self.is_direct
        return file

    def _open_direct(self, path: Path) -> int:
        fd = self._calls.open(str(path), is_direct=True)
        try:
            alignment = self._calls.alignment(fd)
            if alignment is not None and (not alignment or PAGE_NBYTES % alignment):
                raise OSError(errno.EINVAL, f"direct I/O asks for {alignment} bytes")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _allocate(self, file: OpenSlotFile, count: int) -> int:
        while True:
            try:
                self._calls.allocate(file.fd, count * file.slot_nbytes)
            except OSError as exc:
                if exc.errno not in NO_ROOM or count == 1:
                    raise
                os.ftruncate(file.fd, 0)
                count //= 2
            else:
                return count

    def _drop(self, file: OpenSlotFile) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.path)
        finally:
            file.close()
