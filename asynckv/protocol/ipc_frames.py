"""Control frames by which two processes agree to share the memory of a GPU.

One stream a link and buffer: :class:`OpenIpc` or :class:`OpenStoreIpc`,
:class:`Exported`, :class:`Imported`, then ``Accepted`` or a ``Failure``. As in
:mod:`asynckv.protocol.frames`, values only.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from asynckv.protocol.values import Count, Id, Token

__all__ = ("Exported", "Imported", "OpenIpc", "OpenStoreIpc", "OpensIpc")

_Uuid = Annotated[str, msgspec.Meta(max_length=64)]


class _Base(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    """Shared wire settings. Not a public base class."""


class OpenIpc(_Base, frozen=True, tag="openipc"):
    """May this peer open the GPU memory that the lookup buffer's entries are in?

    ``uuid`` names the GPU that it uses itself: numbers differ from process to process.
    """

    uuid: _Uuid


class OpenStoreIpc(_Base, frozen=True, tag="openstoreipc"):
    """As :class:`OpenIpc`, of the memory that the store buffer's values are in."""

    uuid: _Uuid


OpensIpc: TypeAlias = OpenIpc | OpenStoreIpc


class Exported(_Base, frozen=True, tag="exported"):
    """The handle of one allocation of that GPU, which has so many bytes in all.

    ``ticket`` is good for one connection to that abstract socket, which is to be open
    for as long as the memory is. ``digest`` is what this side wants to be compared;
    the stricter one counts.
    """

    address: Id
    ticket: Token
    handle: Annotated[bytes, msgspec.Meta(max_length=64)]
    nbytes: Count
    digest: Literal["full", "edges", "off"] = "edges"


class Imported(_Base, frozen=True, tag="imported"):
    """What was read at the end of the allocation."""

    found: Annotated[bytes, msgspec.Meta(max_length=64)]
