"""Control frames: everything two peers may say to each other.

Values only. A frame belongs to a *stream* (one request and all that follows
from it; stream 0 is the link itself) and may carry a *body* of raw bytes. New
fields only with defaults; a tag is never used for anything else.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from asynckv.types import KVFingerprint, TensorSpec

__all__ = (
    "PROTOCOL_MAJOR",
    "PROTOCOL_MINOR",
    "Accepted",
    "Ack",
    "Arrived",
    "Attach",
    "Attached",
    "Cancel",
    "Cancelled",
    "Commit",
    "Complete",
    "Contains",
    "Contents",
    "Delete",
    "Done",
    "Failure",
    "Flushed",
    "Frame",
    "Get",
    "Goodbye",
    "Grant",
    "Hello",
    "Insert",
    "JoinGroup",
    "Limits",
    "Members",
    "Missing",
    "Nack",
    "Noted",
    "Offer",
    "OpenPipe",
    "OpeningFrame",
    "Peek",
    "PeerIdentity",
    "Ping",
    "Pong",
    "Push",
    "Put",
    "Reached",
    "Read",
    "Refuse",
    "Result",
    "Retract",
    "Select",
    "Settle",
    "Taken",
    "TensorRecord",
    "Welcome",
    "Withdraw",
)

PROTOCOL_MAJOR: Final = 1
PROTOCOL_MINOR: Final = 0

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Name = Annotated[str, msgspec.Meta(max_length=512)]
_Id = Annotated[str, msgspec.Meta(max_length=256)]
_Text = Annotated[str, msgspec.Meta(max_length=2048)]
_Digest = Annotated[bytes, msgspec.Meta(max_length=16)]
_Token = Annotated[bytes, msgspec.Meta(max_length=16)]


class _Base(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    """Shared wire settings. Not a public base class."""


class TensorRecord(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of an entry: its name, what it is, and its digest if known."""

    name: _Name
    spec: TensorSpec
    digest: _Digest = b""


class Contents(msgspec.Struct, frozen=True, array_like=True):
    """The manifest of an entry: what its body holds and what comes by payload.

    A body that carries an entry is this value in msgpack, then the raw bytes of
    ``input_tokens``, of ``roi``, and (if the frame says ``inline``) of every
    tensor in order.
    """

    tensors: Annotated[tuple[TensorRecord, ...], msgspec.Meta(max_length=16384)]
    input_tokens: TensorSpec | None = None
    roi: TensorSpec | None = None


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one side accepts. Checked on the claimed length, before buffering."""

    max_control_bytes: _Count = 64 * 1024
    max_body_bytes: _Count = 16 * 2**20
    max_chunk_bytes: _Count = 4 * 2**20
    max_streams: _Count = 65536
    max_receive_bytes: _Count = 2**30
    heartbeat_ms: _Count = 2000


class PeerIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who a peer is. The same id with another incarnation has lost its memory."""

    id: _Id
    incarnation: _Id
    role: Literal["producer", "consumer", "both"] = "both"
    host_id: _Id = ""
    boot_id: _Id = ""
    pid: _Count = 0


class Hello(_Base, frozen=True, tag="hello"):
    """The dialling side introduces itself. ``nonce`` is for authentication."""

    major: _Count
    minor: _Count
    identity: PeerIdentity
    limits: Limits
    payload_paths: tuple[_Id, ...]
    lanes: _Count
    digest: Literal["full", "edges", "off"] = "full"
    fingerprint: KVFingerprint | None = None
    payload_description: Annotated[bytes, msgspec.Meta(max_length=4096)] = b""
    nonce: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class Welcome(_Base, frozen=True, tag="welcome"):
    """The listening side accepts; both are connected from here on.

    ``link_token`` lets payload lanes attach themselves to this link.
    """

    major: _Count
    minor: _Count
    identity: PeerIdentity
    limits: Limits
    payload_path: _Id
    lanes: _Count
    link_token: Annotated[bytes, msgspec.Meta(max_length=32)]
    digest: Literal["full", "edges", "off"] = "full"
    fingerprint: KVFingerprint | None = None
    payload_description: Annotated[bytes, msgspec.Meta(max_length=4096)] = b""
    nonce: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class Refuse(_Base, frozen=True, tag="refuse"):
    """The peer is not let in, or broke the protocol; nothing follows."""

    code: _Id
    message: _Text
    field: _Id = ""


class Attach(_Base, frozen=True, tag="attach"):
    """First frame of a payload lane's own connection."""

    link_token: Annotated[bytes, msgspec.Meta(max_length=32)]
    lane: _Count


class Attached(_Base, frozen=True, tag="attached"):
    """The lane belongs to its link; from here on it carries chunks only."""


class Ping(_Base, frozen=True, tag="ping"):
    """Application heartbeat. It renews every lease of its link."""

    nonce: _Count


class Pong(_Base, frozen=True, tag="pong"):
    """The answer to a :class:`Ping`, from the peer's event loop."""

    nonce: _Count


class Goodbye(_Base, frozen=True, tag="goodbye"):
    """This side closes cleanly: it opens no more streams and then hangs up."""

    reason: _Text = ""


class Insert(_Base, frozen=True, tag="insert"):
    """Commit an entry. Body: :class:`Contents`, tokens, roi, inline tensors.

    ``streaming``: tensors come one by one, each announced by a :class:`Push`.
    ``digest`` is the entry's, when the sender knows it already.
    """

    entry_id: _Id
    transfer: _Count
    inline: bool
    streaming: bool = False
    ttl_s: Annotated[float, msgspec.Meta(ge=0)] | None = 600.0
    deliveries: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = 1
    digest: _Digest = b""


class Select(_Base, frozen=True, tag="select"):
    """Lease the best matching entry. Body: the query's key.

    ``has_key`` is false for "any entry"; ``stream`` asks for tensors as they
    land (``open_drop_select``).
    """

    has_key: bool
    entry_id: _Id | None = None
    match: Literal["prefix", "exact"] = "prefix"
    min_matched_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = 1
    stream: bool = False


class Peek(_Base, frozen=True, tag="peek"):
    """How many tokens could be matched now? Body: the query's key."""

    has_key: bool


class Taken(_Base, frozen=True, tag="taken"):
    """Answer when the entry has left by its last acknowledgement."""

    entry_id: _Id


class Withdraw(_Base, frozen=True, tag="withdraw"):
    """Remove the entry if nobody holds it."""

    entry_id: _Id


class Settle(_Base, frozen=True, tag="settle"):
    """Was this delivery's acknowledgement accepted? Asked after a reconnect."""

    entry_id: _Id
    token: _Token


class Put(_Base, frozen=True, tag="put"):
    """Store one tensor by name. Body: the tensor's bytes if ``inline``.

    Without ``spec`` the name is deleted.
    """

    key: _Name
    transfer: _Count
    inline: bool
    spec: TensorSpec | None = None
    digest: _Digest = b""


class Get(_Base, frozen=True, tag="get"):
    """Send what is stored by that name."""

    key: _Name


class Delete(_Base, frozen=True, tag="delete"):
    """Forget that name."""

    key: _Name


class Contains(_Base, frozen=True, tag="contains"):
    """Which of these names are stored?"""

    keys: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=4096)]


class OpenPipe(_Base, frozen=True, tag="pipe"):
    """This link is a pipe from here on. ``name`` is for groups."""

    name: _Id = ""


class JoinGroup(_Base, frozen=True, tag="join"):
    """That rank of a group has come, and takes pipes at ``url``. Asked of rank 0."""

    rank: _Count
    size: _Count
    url: _Name


class Missing(_Base, frozen=True, tag="missing"):
    """Group: who has not come yet, as rank 0 knows it."""

    ranks: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=1024)]


class Members(_Base, frozen=True, tag="members"):
    """Group: all have come. Where each rank takes pipes that say ``group_id``."""

    group_id: _Id
    urls: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=1024)]


class Arrived(_Base, frozen=True, tag="arrived"):
    """Group: this rank is at its barrier of that number; from rank 0: all are."""

    number: _Count


class Grant(_Base, frozen=True, tag="grant"):
    """The receiver's memory is ready for this transfer."""

    transfer: _Count


class Done(_Base, frozen=True, tag="done"):
    """The last byte of one part was sent; this is its digest."""

    transfer: _Count
    part: _Count
    digest: _Digest = b""


class Push(_Base, frozen=True, tag="push"):
    """One tensor follows: of a streaming entry, or of a pipe.

    The body holds its bytes if ``inline``; otherwise it comes by payload, as
    ``part`` of ``transfer``. On a pipe ``spec`` says what comes (``None`` is
    the value None) and each tensor is a transfer of its own.
    """

    transfer: _Count
    part: _Count
    inline: bool
    spec: TensorSpec | None = None
    digest: _Digest = b""


class Read(_Base, frozen=True, tag="read"):
    """Pipe: there is room for this many more bytes and tensors.

    The first one says how much there is in all, and the others what the
    application has taken since.
    """

    nbytes: _Count
    tensors: _Count


class Flushed(_Base, frozen=True, tag="flushed"):
    """Pipe: everything up to this many tensors is verified in our memory."""

    tensors: _Count


class Offer(_Base, frozen=True, tag="offer"):
    """A lease. Body: :class:`Contents`, tokens, roi, inline tensors.

    An offer that is not ``complete`` may still be retracted; its parts come as
    they land, then a :class:`Complete`. ``attempt`` counts deliveries.
    """

    transfer: _Count
    inline: bool
    entry_id: _Id = ""
    token: _Token = b""
    attempt: _Count = 1
    matched_tokens: _Count = 0
    complete: bool = True


class Complete(_Base, frozen=True, tag="complete"):
    """Every part of an offer that began incomplete has landed: it is committed."""

    transfer: _Count


class Commit(_Base, frozen=True, tag="commit"):
    """Every tensor of a streaming insert was pushed."""


class Retract(_Base, frozen=True, tag="retract"):
    """The offer is void and the stream waits for another; or the push is void."""

    transfer: _Count


class Ack(_Base, frozen=True, tag="ack"):
    """The delivery was verified (plain) or used (``async with``).

    With ``confirm`` the requester can still cancel: it counts when a
    :class:`Reached` follows, or when the link is lost before one could come.
    """

    token: _Token
    confirm: bool = False


class Noted(_Base, frozen=True, tag="noted"):
    """The acknowledgement came; it counts when a :class:`Reached` follows."""


class Reached(_Base, frozen=True, tag="reached"):
    """The application has the delivery from now on."""

    token: _Token


class Nack(_Base, frozen=True, tag="nack"):
    """The delivery is given back. ``reached``: the application had it and failed."""

    token: _Token
    reached: bool = False


class Accepted(_Base, frozen=True, tag="accepted"):
    """The entry is in (or was before), or the acknowledgement counted."""


class Cancel(_Base, frozen=True, tag="cancel"):
    """The requester no longer wants it. Answered by the stream's last frame."""


class Cancelled(_Base, frozen=True, tag="cancelled"):
    """Last frame of a cancelled stream. ``committed``: the cancel came too late."""

    committed: bool = False


class Result(_Base, frozen=True, tag="result"):
    """Last frame of a question: a number, or one bit a name."""

    value: _Count = 0
    flags: Annotated[tuple[bool, ...], msgspec.Meta(max_length=4096)] = ()


class Failure(_Base, frozen=True, tag="failure"):
    """Last frame of a stream that ended by an error; see ``protocol.failures``."""

    code: _Id
    message: _Text
    reason: _Id = ""
    nbytes: _Count = 0
    max_bytes: _Count = 0


OpeningFrame: TypeAlias = (
    Insert
    | Select
    | Peek
    | Taken
    | Withdraw
    | Settle
    | Put
    | Get
    | Delete
    | Contains
    | JoinGroup
    | OpenPipe
)

Frame: TypeAlias = (
    Hello
    | Welcome
    | Refuse
    | Attach
    | Attached
    | Ping
    | Pong
    | Goodbye
    | OpeningFrame
    | Grant
    | Done
    | Push
    | Read
    | Flushed
    | Missing
    | Members
    | Arrived
    | Offer
    | Complete
    | Commit
    | Retract
    | Ack
    | Noted
    | Reached
    | Nack
    | Accepted
    | Cancel
    | Cancelled
    | Result
    | Failure
)
