"""Control frames of a transfer: what makes its bytes leave, and says that they did.

As in :mod:`asynckv.protocol.frames`, values only.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from asynckv.protocol.values import Count, Digest

__all__ = ("MAX_RIDERS", "Done", "Grant", "Riders")

MAX_RIDERS: Final = 1024
"""So many parts ride with one frame."""


class _Base(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    """Shared wire settings. Not a public base class."""


class Grant(_Base, frozen=True, tag="grant"):
    """The receiver's memory is ready for this transfer."""

    transfer: Count


class Done(_Base, frozen=True, tag="done"):
    """The last byte of one part was sent; this is its digest."""

    transfer: Count
    part: Count
    digest: Digest = b""


class Riders(_Base, frozen=True, tag="riders"):
    """Small parts of a transfer: their bytes are the body, one after the other.

    There are as many ``digests``, or none where the link carries none.
    """

    transfer: Count
    parts: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_RIDERS)]
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_RIDERS)] = ()
