"""Control frames by which a peer keeps stored values from being dropped.

One stream for as long as it lasts: :class:`Pin`, :class:`Pinned`, and a ``Cancel`` when
it is over. As in :mod:`asynckv.protocol.frames`, values only.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from asynckv.protocol.values import Name

__all__ = ("Pin", "Pinned")


class _Base(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    """Shared wire settings. Not a public base class."""


class Pin(_Base, frozen=True, tag="pin"):
    """Keep what is stored under these names until this stream ends."""

    keys: Annotated[tuple[Name, ...], msgspec.Meta(max_length=4096)]


class Pinned(_Base, frozen=True, tag="pinned"):
    """Which of them are there, and kept. Not the last frame."""

    flags: Annotated[tuple[bool, ...], msgspec.Meta(max_length=4096)] = ()
