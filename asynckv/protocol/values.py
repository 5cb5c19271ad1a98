"""What frames are made of: settings, bounded fields, limits, identities, a manifest.

Values only, for :mod:`asynckv.protocol.frames`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from asynckv.types import TensorSpec

__all__ = (
    "MAX_TENSORS",
    "Base",
    "Contents",
    "Count",
    "Digest",
    "Facts",
    "Id",
    "Limits",
    "Mac",
    "MappedOffer",
    "Name",
    "NamedSpecs",
    "PeerIdentity",
    "Place",
    "Port",
    "Request",
    "Text",
    "Token",
)

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Name = Annotated[str, msgspec.Meta(max_length=512)]
Id = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=2048)]
Digest = Annotated[bytes, msgspec.Meta(max_length=16)]
Token = Annotated[bytes, msgspec.Meta(max_length=16)]
Mac = Annotated[bytes, msgspec.Meta(max_length=32)]


# A name that is logged: one line, whoever chose it.
_Line = Annotated[
    str, msgspec.Meta(max_length=256, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z")
]


class Base(
    msgspec.Struct,
    frozen=True,
    tag_field="t",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Wire settings of all frames. Not a frame."""


class Request(Base, frozen=True, kw_only=True):
    """What every request may carry. Not a frame.

    ``trace`` is reserved for whoever follows a request from process to process: it is
    read by nobody yet, and said again nowhere.
    """

    trace: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


MAX_TENSORS: Final = 16384
"""So many tensors has an entry at most."""

NamedSpecs = Annotated[
    tuple[tuple[Name, TensorSpec], ...], msgspec.Meta(max_length=MAX_TENSORS)
]
"""The layout of an entry: the name of each tensor, and what it is."""


class Contents(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The manifest of an entry: what its body holds and what comes by payload.

    ``layout`` is :data:`NamedSpecs` in msgpack: a value of its own, since that of one
    entry is often that of the next. Each tensor has one of ``digests``, which is empty
    if it is not known.

    A body that carries an entry is this value in msgpack, then the raw bytes of
    ``input_tokens``, of ``roi``, and (if the frame says ``inline``) of every
    tensor in order.
    """

    layout: bytes
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    input_tokens: TensorSpec | None = None
    roi: TensorSpec | None = None


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where one tensor lies in a memory file: at ``start`` of some ``runs``.

    Each run is an offset and its bytes, in whole pages; they follow one another.
    ``generation`` differs between all tensors that were ever there.
    """

    runs: Annotated[tuple[tuple[Count, Count], ...], msgspec.Meta(max_length=64)]
    start: Count
    generation: Count


class MappedOffer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How an offer's body ends: ``nbytes`` of a :class:`Place` or None a tensor.

    The bytes of those that have none follow it. The memory is the consumer's until
    it has released ``pin``. ``edges`` is the digest of all first and last bytes.
    """

    pin: Count
    nbytes: Count
    edges: Digest = b""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one side accepts. Checked on the claimed length, before buffering.

    Of requests and of cancelled ones ``max_streams`` may come at once, and then
    as many a second; a peer that floods us with more loses its link.
    """

    max_control_bytes: Count = 64 * 1024
    max_body_bytes: Count = 16 * 2**20
    max_chunk_bytes: Count = 4 * 2**20
    max_streams: Count = 65536
    max_receive_bytes: Count = 2**30
    heartbeat_ms: Count = 2000
    max_requests_per_s: Count = 200_000
    max_cancels_per_s: Count = 20_000


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a value is like. It is there for ``ttl_s`` more seconds; 0: for ever."""

    spec: TensorSpec
    ttl_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    is_pinned: bool = False


class PeerIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who a peer is. The same id with another incarnation has lost its memory."""

    id: _Line
    incarnation: _Line
    role: Literal["producer", "consumer", "both"] = "both"
    host_id: _Line = ""
    boot_id: _Line = ""
    pid: Count = 0
