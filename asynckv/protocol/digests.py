"""Digests of payload bytes and of whole entries: xxh3, 128 bits.

They tell bytes that changed by accident; they are no protection against
somebody who changes them on purpose.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Final, TypeAlias

import msgspec
import xxhash

from asynckv.protocol.frames import TensorRecord

__all__ = ("DIGEST_NBYTES", "Digester", "digest_of", "entry_digest")

_Buffer: TypeAlias = bytes | bytearray | memoryview

DIGEST_NBYTES: Final = 16
_name_of: Final = operator.attrgetter("name")
_encode: Final = msgspec.msgpack.Encoder().encode


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

    def digest(self) -> bytes:
        """Return the digest of everything added so far."""
        return self._state.digest()


def entry_digest(records: Iterable[TensorRecord]) -> bytes:
    """Return the digest of an entry: names, dtypes, shapes and tensor digests.

    The order of ``records`` does not matter: names are unique in an entry.
    """
    return digest_of(_encode(sorted(records, key=_name_of)))
