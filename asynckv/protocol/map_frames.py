"""Control frames by which two peers of one host agree to share memory.

One stream a link: :class:`OpenMap`, :class:`Mappable`, :class:`Mapped`, then
``Accepted`` or a ``Failure``. As in :mod:`asynckv.protocol.frames`, values only.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from asynckv.protocol.values import Count, Id, Token

__all__ = ("Mappable", "Mapped", "OpenMap")


class _Base(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    """Shared wire settings. Not a public base class."""


class OpenMap(_Base, frozen=True, tag="openmap"):
    """May this peer map the memory that the lookup buffer's entries are in?"""


class Mappable(_Base, frozen=True, tag="mappable"):
    """Ask at that abstract socket for the file, which has so many bytes.

    ``ticket`` is good for one connection. ``digest`` is what this side wants to be
    compared; the stricter one counts.
    """

    address: Id
    ticket: Token
    nbytes: Count
    digest: Literal["full", "edges", "off"] = "edges"


class Mapped(_Base, frozen=True, tag="mapped"):
    """What was read through the mapping, at the file's last page."""

    found: Annotated[bytes, msgspec.Meta(max_length=64)]
