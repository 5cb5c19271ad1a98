"""What a value begins with wherever it is kept: whose it is, and how to know its bytes.

A prefix with the length of what follows, then that, then a digest of both::

    magic (7) | version (1) | length of the fields (4, little endian)
    fields: MessagePack of :class:`ValueHeader`
    xxh3-128 of all that (16)

and then the value's bytes, raw. A header is believed as far as its digest goes: that
finds what is torn, cut or changed on its way. It is no protection from who can write
to the tier.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from typing import Final

import msgspec

from asynckv.protocol.wire import digest_of
from asynckv.types import KVFingerprint, TensorSpec

__all__ = (
    "MAX_HEADER_NBYTES",
    "ForeignHeader",
    "ShortHeader",
    "ValueHeader",
    "ValueName",
    "hashed_key",
    "pack_header",
    "unpack_header",
)

MAX_HEADER_NBYTES: Final = 3 * 1024
"""With a header of its own a tier fits both into one page."""

_MAGIC: Final = b"asynckv"
_VERSION: Final = 1
_PREFIX: Final = struct.Struct("<7sBI")
_DIGEST_NBYTES: Final = 16
_NAME_NBYTES: Final = 16


class ShortHeader(ValueError):
    """Bytes that end before their header does; ``needed`` is how long that is."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"a header of {needed} bytes is cut short")
        self.needed = needed


class ForeignHeader(ValueError):
    """Bytes that are no header of this version, or not as they were written."""


class ValueName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which value it is: a key, of one model and in one namespace."""

    key: str
    fingerprint: KVFingerprint | None = None
    namespace: str = ""

    @property
    def tier_key(self) -> str:
        """What tiers call it: hexadecimal digits, each part of one length.

        The parts are cut from blake2b digests, 128 bits of the namespace's and of the
        fingerprint's, so that those of one can be listed together, and 256 of the
        key's. The whole name is in the header.
        """
        return self.tier_prefix + hashed_key(self.key)

    @property
    def tier_prefix(self) -> str:
        """What the names of all keys of that model and namespace begin with."""
        return _prefix_of(self.namespace, self.fingerprint)


class ValueHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one value: its name and shape, the digest of its bytes, and its times.

    ``epoch`` orders the changes of a key: nanoseconds of the clock of the store that
    made it, each one later than the last. ``expires_at_s`` is in seconds since 1970.
    """

    name: ValueName
    spec: TensorSpec
    digest: bytes
    epoch: int
    expires_at_s: float | None = None


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(ValueHeader)


def hashed_key(key: str) -> str:
    """Return the last part of what tiers call a key."""
    return hashlib.blake2b(key.encode(), digest_size=32).hexdigest()


def pack_header(header: ValueHeader) -> bytes:
    """Return the bytes that the value begins with."""
    fields = _encoder.encode(header)
    packed = _PREFIX.pack(_MAGIC, _VERSION, len(fields)) + fields
    return packed + digest_of(packed)


def unpack_header(data: bytes | memoryview) -> tuple[ValueHeader, int]:
    """Return the header that ``data`` begins with, and how many bytes it takes.

    :raises ShortHeader: ``data`` ends before it
    :raises ForeignHeader: it begins with none of this version, or with a changed one
    """
    if len(data) < _PREFIX.size:
        raise ShortHeader(_PREFIX.size)
    magic, version, length = _PREFIX.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise ForeignHeader("no value of asynckv, or of another version of it")
    ends = _PREFIX.size + length
    needed = ends + _DIGEST_NBYTES
    if needed > MAX_HEADER_NBYTES:
        raise ForeignHeader(f"a header of {needed} bytes")
    if len(data) < needed:
        raise ShortHeader(needed)
    if digest_of(data[:ends]) != bytes(data[ends:needed]):
        raise ForeignHeader("a header that is not as it was written")
    try:
        return _decoder.decode(data[_PREFIX.size : ends]), needed
    except (msgspec.MsgspecError, ValueError, TypeError, UnicodeError) as exc:
        raise ForeignHeader(f"a header that says nothing of use: {exc}") from exc


@functools.lru_cache(maxsize=64)
def _prefix_of(namespace: str, fingerprint: KVFingerprint | None) -> str:
    parts = (namespace.encode(), msgspec.msgpack.encode(fingerprint))
    digests = [hashlib.blake2b(one, digest_size=_NAME_NBYTES) for one in parts]
    return "/".join(("k1", *[one.hexdigest() for one in digests], ""))
