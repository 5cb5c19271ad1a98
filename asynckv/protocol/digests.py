"""Digests of payload bytes: xxh3, 128 bits.

They tell bytes that changed by accident; they are no protection against
somebody who changes them on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import xxhash

__all__ = ("Digester", "digest_of")

_Buffer: TypeAlias = bytes | bytearray | memoryview


def digest_of(buffer: _Buffer) -> bytes:
    """Return the 16-byte digest of ``buffer``, which must be contiguous."""
    return xxhash.xxh3_128_digest(buffer)


class Digester:
    """The digest of bytes that come in pieces; any chunking gives the same."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, piece: _Buffer) -> None:
        """Add the next bytes. Releases the GIL over a large piece."""
        self._state.update(piece)

    def update_all(self, pieces: Iterable[_Buffer]) -> None:
        """Add these bytes, in order."""
        update = self._state.update
        for piece in pieces:
            update(piece)

    def digest(self) -> bytes:
        """Return the digest of everything added so far."""
        return self._state.digest()
