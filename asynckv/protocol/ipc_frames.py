"""Control frames by which two processes agree to share the memory of a GPU.

One stream a link: :class:`OpenIpc`, :class:`Exported`, :class:`Imported`, then
``Accepted`` or a ``Failure``. Both sides of a pipe show theirs: who asks says
:class:`Exported` too, behind its :class:`Imported`, and hears an :class:`Imported`
before the ``Accepted``. :class:`PushShared` belongs to the pipe's own stream.

A peer that inserts into a buffer shows memory of its own by :class:`ShowIpc`, with its
:class:`Exported` right behind; it hears an :class:`Imported`, then ``Accepted`` or a
``Failure``. :class:`GrantShared` and :class:`SentShared` belong to the stream of an
insert. As in :mod:`asynckv.protocol.frames`, values only.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from asynckv.protocol.values import Count, Digest, Id, Token
from asynckv.types import TensorSpec

__all__ = (
    "Exported",
    "GrantShared",
    "Imported",
    "IpcFrame",
    "OpenIpc",
    "PushShared",
    "SentShared",
    "ShowIpc",
)

_Uuid = Annotated[str, msgspec.Meta(max_length=64)]


class _Base(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    """Shared wire settings. Not a public base class."""


class OpenIpc(_Base, frozen=True, tag="openipc"):
    """May this peer open the GPU memory that the lookup buffer's entries are in?

    Of a pipe: that which the other side sends from.

    ``uuid`` names the GPU that it uses itself: numbers differ from process to process.
    """

    uuid: _Uuid


class ShowIpc(_Base, frozen=True, tag="showipc"):
    """Will the buffers' side open memory of that GPU that this peer puts from?"""

    uuid: _Uuid


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


class PushShared(_Base, frozen=True, tag="pushshared"):
    """Pipe: one tensor lies in the memory that this side has exported.

    It begins at ``offset``, and stays there until it is flushed. ``digest`` is of what
    both sides want to be compared: of all its bytes, of the first and last ones, or
    there is none. Who cannot read it there grants it as any other one.
    """

    transfer: Count
    spec: TensorSpec
    offset: Count
    digest: Digest = b""


class GrantShared(_Base, frozen=True, tag="grantshared"):
    """The receiver's memory is ready: it reads all that does not ride where it lies.

    ``kind`` says what digest the receiver wants; the stricter one counts.
    """

    transfer: Count
    kind: Literal["full", "edges", "off"]


class SentShared(_Base, frozen=True, tag="sentshared"):
    """One part lies in the memory that this side has exported, at ``offset``.

    It stays there until the receiver has said that it has it, or is through with it.
    Without an offset the part is elsewhere: all of the transfer is to be granted
    otherwise. ``digest`` is of all its bytes, of the first and last ones, or there is
    none.
    """

    transfer: Count
    part: Count
    kind: Literal["full", "edges", "off"]
    offset: Count | None = None
    digest: Digest = b""


IpcFrame: TypeAlias = Exported | Imported | PushShared | GrantShared | SentShared
