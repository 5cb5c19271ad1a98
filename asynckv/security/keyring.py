"""What one side proves itself with, as its files have it now."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from typing import Final, TypeAlias

from asynckv.errors import ConfigError
from asynckv.security.shared_secret import Secret, read_secrets
from asynckv.security.tls import TLS, TlsKeys, read_tls

__all__ = ("NO_KEYS", "Keyring", "Keys")

logger = logging.getLogger(__name__)

_FRESH_S: Final = 1.0

_Stamp: TypeAlias = tuple[tuple[int, ...] | None, ...]


@dataclasses.dataclass(frozen=True)
class Keys:
    """What was read: one secret, or two while they are exchanged."""

    secrets: tuple[Secret, ...] = ()
    tls: TlsKeys | None = None

    @property
    def first_secret(self) -> Secret | None:
        """What a dialling side proves itself with; a listening one takes any."""
        return self.secrets[0] if self.secrets else None


class Keyring:
    """Where the keys of one side are; without any, it proves nothing and asks nothing.

    Files are read again when they have changed, so that keys are exchanged
    without a restart. If they cannot be read by then the old ones stay in use, and
    it is tried again at the next look.
    """

    def __init__(
        self,
        *,
        secret_file: str | None = None,
        secrets: tuple[Secret, ...] = (),
        tls: TLS | None = None,
        allow_plaintext: bool = False,
    ) -> None:
        self.has_secret = secret_file is not None or bool(secrets)
        self.has_tls = tls is not None
        self.allow_plaintext = allow_plaintext
        self.was_warned = False
        self._secret_file = secret_file
        self._secrets = secrets
        self._tls = tls
        self._paths = [] if tls is None else list(tls.paths)
        if secret_file is not None:
            self._paths.append(secret_file)
        self._lock = threading.Lock()
        self._keys: Keys | None = None if self._paths else Keys(secrets)
        self._stamp: _Stamp = ()
        self._failure = ""
        self._checked_at = 0.0

    def __repr__(self) -> str:
        has = {"a secret": self.has_secret, "certificates": self.has_tls}
        return f"<Keyring of {' and '.join(n for n in has if has[n]) or 'no keys'}>"

    def fresh(self) -> Keys | None:
        """Return the keys if they were looked at within a second. Never blocks."""
        if self._paths and time.monotonic() - self._checked_at > _FRESH_S:
            return None
        return self._keys

    def current(self) -> Keys:
        """Return the keys as the files have them now. Blocks.

        :raises ConfigError: they cannot be read, and never could
        """
        with self._lock:
            stamp = tuple(map(_stamp_of, self._paths))
            if self._keys is None:
                self._keys, self._stamp = self._read(), stamp
            elif stamp != self._stamp:
                self._read_again(stamp)
            self._checked_at = time.monotonic()
            return self._keys

    def _read(self) -> Keys:
        secrets = self._secrets
        if self._secret_file is not None:
            secrets = read_secrets(self._secret_file)
        return Keys(secrets, None if self._tls is None else read_tls(self._tls))

    def _read_again(self, stamp: _Stamp) -> None:
        try:
            self._keys = self._read()
        except ConfigError as exc:
            if str(exc) != self._failure:
                self._failure = str(exc)
                logger.error(
                    "keys that were changed are no good, the old stay: %s", exc
                )
            return
        self._stamp, self._failure = stamp, ""
        logger.info("keys were read again")


NO_KEYS: Final = Keyring()
"""Proves nothing, asks nothing: for loopback, unix sockets and memory."""


def _stamp_of(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # reading it says why
        return None
    # The last is for a mode or an owner that was changed, and nothing else.
    return found.st_mtime_ns, found.st_ino, found.st_size, found.st_ctime_ns
