"""A slot: one page that says what is in it, then the pages of one value.

Little endian::

    magic (7) | version (1) | xxh3-128 of all that follows (16)
    sequence (8) | file (4) | slot (4) | bytes of the value (8) | void at (8)
    hash of the key (16) | length of the key (2) | length of the header (2)
    the key, then the value's own header

and the rest of the page is zero. A page is believed as far as its digest goes, and
where it was written: one that was moved is none. The digest says nothing of the value's
pages: the value's header has the digest of those.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy
import numpy.typing

from asynckv.protocol.wire import digest_of
from asynckv.stores.disk.calls import PAGE_NBYTES

__all__ = (
    "MAX_NAMES_NBYTES",
    "FoundSlot",
    "FoundSlots",
    "KeyHash",
    "SlotHeader",
    "body_pages_of",
    "find_slot",
    "fits_page",
    "hash_of",
    "hashes_of",
    "largest_body_pages",
    "pack_slot",
    "unpack_slot",
)

KeyHash: TypeAlias = tuple[int, int]
"""128 bits of a key, as two numbers."""

FoundSlot: TypeAlias = tuple[int, int, int, int, float]
"""A slot, the hash of its key, its sequence, and when it is void."""

_Numbers: TypeAlias = numpy.typing.NDArray[numpy.uint64]

_MAGIC: Final = b"akvslot"
_VERSION: Final = 1
_BEGIN: Final = struct.Struct("<7sB16s")
_FIELDS: Final = struct.Struct("<QIIQdQQHH")
_ALL: Final = struct.Struct(_BEGIN.format + _FIELDS.format[1:])
_HASH: Final = struct.Struct("<QQ")
_NAMES_AT: Final = _BEGIN.size + _FIELDS.size

MAX_NAMES_NBYTES: Final = PAGE_NBYTES - _NAMES_AT
"""Of a key and a value's header together."""

_STEPS: Final = 3
"""Bits of a slot's size that count: four sizes between one and twice as much."""


@dataclasses.dataclass(frozen=True, slots=True)
class SlotHeader:
    """What the first page of a slot says. ``file`` and ``slot`` are where it is."""

    key: str
    header: bytes
    body_nbytes: int
    sequence: int
    file: int
    slot: int
    expires_at_s: float | None = None


def hash_of(key: str) -> KeyHash:
    """Return what stands for a key in memory.

    Two keys with one hash are told apart by the slot, which has the key.
    """
    low, high = _HASH.unpack(digest_of(_encoded(key)))
    return low, high


def hashes_of(keys: Sequence[str]) -> tuple[_Numbers, _Numbers]:
    """Return the two halves of the hashes of many keys."""
    digests = b"".join([digest_of(_encoded(key)) for key in keys])
    low, high = numpy.frombuffer(digests, "<u8").reshape(-1, 2).T
    return low, high


def body_pages_of(nbytes: int) -> int:
    """Return how many pages the slot of such a value has behind its first one.

    A few sizes alone, so that a slot that is free fits the next value: at most a
    quarter more than is needed.
    """
    pages = max(-(-nbytes // PAGE_NBYTES), 1)
    shift = max(pages.bit_length() - _STEPS, 0)
    return -(-pages // (1 << shift)) << shift


def largest_body_pages(nbytes: int) -> int:
    """Return the most pages that a value may have in a slot of ``nbytes``; 0: none."""
    pages = nbytes // PAGE_NBYTES - 1
    shift = max(pages.bit_length() - _STEPS, 0)
    return max(pages >> shift << shift, 0)


def fits_page(key: str, header: bytes) -> bool:
    """Is there room for these in a first page?"""
    return len(_encoded(key)) + len(header) <= MAX_NAMES_NBYTES


def pack_slot(header: SlotHeader, page: memoryview) -> None:
    """Write a first page. What does not fit is not asked for."""
    key = _encoded(header.key)
    names = key + header.header
    fields = _FIELDS.pack(
        header.sequence,
        header.file,
        header.slot,
        header.body_nbytes,
        math.inf if header.expires_at_s is None else header.expires_at_s,
        *hash_of(header.key),
        len(key),
        len(header.header),
    )
    rest = bytes(MAX_NAMES_NBYTES - len(names))
    digest = digest_of(fields + names)
    page[:] = _BEGIN.pack(_MAGIC, _VERSION, digest) + fields + names + rest


def unpack_slot(page: memoryview) -> SlotHeader | None:
    """Return what a first page says; ``None``: nothing that can be believed."""
    fields = _fields_of(page)
    if fields is None:
        return None
    sequence, file, slot, body_nbytes, expires, _, _, key_nbytes, header_nbytes = fields
    names = page[_NAMES_AT : _NAMES_AT + key_nbytes + header_nbytes].tobytes()
    return SlotHeader(
        names[:key_nbytes].decode(errors="surrogatepass"),
        names[key_nbytes:],
        body_nbytes,
        sequence,
        file,
        slot,
        None if expires == math.inf else expires,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class FoundSlots:
    """What the first pages of some slots of one file say: a row for each good one."""

    slots: numpy.typing.NDArray[numpy.int64]
    low: _Numbers
    high: _Numbers
    sequences: _Numbers
    expires: numpy.typing.NDArray[numpy.float64]

    @classmethod
    def of(cls, rows: Sequence[FoundSlot]) -> FoundSlots:
        """Return what :func:`find_slot` has found, together."""
        slots, low, high, sequences, expires = zip(*rows, strict=True) if rows else _NO
        return cls(
            numpy.array(slots, numpy.int64),
            numpy.array(low, numpy.uint64),
            numpy.array(high, numpy.uint64),
            numpy.array(sequences, numpy.uint64),
            numpy.array(expires, numpy.float64),
        )


_NO: Final[tuple[tuple[()], ...]] = ((),) * 5


def find_slot(page: memoryview, file: int, slot: int) -> FoundSlot | None:
    """Return what a first page says of a slot, for :class:`FoundSlots`, if it is good.

    As little as there has to be: it is called for millions of slots.
    """
    fields = _fields_of(page)
    if fields is None or fields[1] != file or fields[2] != slot:
        return None
    sequence, _, _, _, expires, low, high, _, _ = fields
    return slot, low, high, sequence, expires


def _fields_of(page: memoryview) -> list[Any] | None:
    """Return the fields of a first page: empty, torn and foreign ones have none."""
    magic, version, digest, *fields = _ALL.unpack_from(page)
    if magic != _MAGIC or version != _VERSION:
        return None
    used = _NAMES_AT + fields[-2] + fields[-1]
    if used > PAGE_NBYTES or digest_of(page[_BEGIN.size : used]) != digest:
        return None
    return fields


def _encoded(key: str) -> bytes:
    return key.encode(errors="surrogatepass")
