"""Files that only their owner may read: secrets, and the keys of certificates."""

from __future__ import annotations

import os
import stat
from typing import Final

from asynckv.errors import ConfigError

__all__ = ("check_private", "read_private")

_MAX_BYTES: Final = 64 * 1024


def check_private(path: str) -> None:
    """Refuse a file that somebody else can read. Blocks.

    :raises ConfigError: it is no file, its mode lets others read it, or it is
        another user's
    """
    os.close(_open_private(path))


def read_private(path: str) -> bytes:
    """Return the first 64 KiB of a file that nobody else can read. Blocks.

    :raises ConfigError: it cannot be read, its mode lets others read it, or it
        is another user's
    """
    descriptor = _open_private(path)
    try:
        return os.read(descriptor, _MAX_BYTES)
    finally:
        os.close(descriptor)


def _open_private(path: str) -> int:
    try:
        # A named pipe must not make us wait for somebody who writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as exc:  # the latter: of a NUL in it
        why = getattr(exc, "strerror", exc)
        raise ConfigError(
            f"{path} cannot be read: {why}",
            hint="check the path, and that this user owns the file",
        ) from exc
    status = os.fstat(descriptor)
    mode = status.st_mode
    is_ours = status.st_uid in (0, os.geteuid())  # what root owns, root may hand out
    if stat.S_ISREG(mode) and is_ours and not mode & (stat.S_IRWXG | stat.S_IRWXO):
        return descriptor
    os.close(descriptor)
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is no file", hint="write the path of a plain file")
    if not is_ours:
        raise ConfigError(
            f"{path} belongs to another user, who can read it",
            hint="use a file of this user's, or of root's",
        )
    raise ConfigError(
        f"{path} can be read by others than its owner: its mode is "
        f"{stat.S_IMODE(mode):04o}",
        hint=f"chmod 600 {path}",
    )
