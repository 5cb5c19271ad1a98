"""Control frames: everything two peers may say to each other.

Values only. A frame belongs to a *stream* (one request and all that follows from it;
stream 0 is the link itself) and may carry a *body* of raw bytes. New fields only with
defaults; a tag is never used for anything else. A peer keeps stored values from being
dropped on one stream for as long as that lasts: :class:`Pin`, :class:`Pinned`, and a
``Cancel`` when it is over.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from asynckv.protocol.transfer_frames import (
    DeviceFrame,
    Eager,
    Exposed,
    Grant,
    OpenDevices,
    OpenMemory,
    Proved,
    Sent,
)
from asynckv.protocol.values import (
    Base,
    Count,
    Digest,
    Facts,
    Id,
    Limits,
    Mac,
    MappedOffer,
    Name,
    PeerIdentity,
    Place,
    Port,
    Request,
    Text,
    Token,
)
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
    "Challenge",
    "Clear",
    "Commit",
    "Complete",
    "Contains",
    "Delete",
    "Failure",
    "Flushed",
    "Frame",
    "Get",
    "Goodbye",
    "Hello",
    "Insert",
    "JoinGroup",
    "Members",
    "Missing",
    "Nack",
    "Noted",
    "Offer",
    "OpenPipe",
    "OpeningFrame",
    "Peek",
    "Pin",
    "Ping",
    "Pinned",
    "Pong",
    "Proof",
    "Push",
    "Put",
    "Reached",
    "Read",
    "Refuse",
    "Result",
    "Retract",
    "Select",
    "Settle",
    "Stat",
    "Taken",
    "Took",
    "Welcome",
    "Withdraw",
)


class Pin(Request, frozen=True, tag="pin"):
    """Keep what is stored under these names until this stream ends.

    What is not in memory is brought there first, for ``within_s`` at most. Of a
    ``prefix`` nothing is kept after the first one that is not there.
    """

    keys: Annotated[tuple[Name, ...], msgspec.Meta(max_length=4096)]
    within_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    prefix: bool = False


class Pinned(Base, frozen=True, tag="pinned"):
    """Which of them are there, and kept. Not the last frame."""

    flags: Annotated[tuple[bool, ...], msgspec.Meta(max_length=4096)] = ()


PROTOCOL_MAJOR: Final = 2
PROTOCOL_MINOR: Final = 0


class Hello(Base, frozen=True, tag="hello"):
    """The dialling side introduces itself. With a ``nonce`` it shares a secret."""

    major: Count
    minor: Count
    identity: PeerIdentity
    limits: Limits
    payload_paths: tuple[Id, ...]
    lanes: Count
    digest: Literal["full", "edges", "off"] = "full"
    fingerprint: KVFingerprint | None = None
    payload_description: Annotated[bytes, msgspec.Meta(max_length=4096)] = b""
    nonce: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class Welcome(Base, frozen=True, tag="welcome"):
    """The listening side accepts; both are connected from here on.

    ``link_token`` lets payload lanes attach themselves to this link.
    """

    major: Count
    minor: Count
    identity: PeerIdentity
    limits: Limits
    payload_path: Id
    lanes: Count
    link_token: Annotated[bytes, msgspec.Meta(max_length=32)]
    digest: Literal["full", "edges", "off"] = "full"
    fingerprint: KVFingerprint | None = None
    payload_description: Annotated[bytes, msgspec.Meta(max_length=4096)] = b""


class Challenge(Base, frozen=True, tag="challenge"):
    """The listening side wants a :class:`Proof` of the shared secret."""

    nonce: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class Proof(Base, frozen=True, tag="proof"):
    """A side shares the secret: the dialling one, or, after its Welcome, the other."""

    mac: Mac


class Refuse(Base, frozen=True, tag="refuse"):
    """The peer is not let in, or broke the protocol; nothing follows."""

    code: Id
    message: Text
    field: Id = ""


class Attach(Base, frozen=True, tag="attach"):
    """First frame of a payload lane's own connection."""

    link_token: Annotated[bytes, msgspec.Meta(max_length=32)]
    lane: Count
    proof: Mac = b""


class Attached(Base, frozen=True, tag="attached"):
    """The lane belongs to its link; from here on it carries chunks only."""

    proof: Mac = b""


class Ping(Base, frozen=True, tag="ping"):
    """Application heartbeat. It renews every lease of its link."""

    nonce: Count


class Pong(Base, frozen=True, tag="pong"):
    """The answer to a :class:`Ping`, from the peer's event loop."""

    nonce: Count


class Goodbye(Base, frozen=True, tag="goodbye"):
    """This side closes cleanly: it opens no more streams and then hangs up."""

    reason: Text = ""


class Insert(Request, frozen=True, tag="insert"):
    """Commit an entry. Body: :class:`Contents`, tokens, roi, inline tensors.

    ``streaming``: tensors come one by one, each announced by a :class:`Push`.
    ``digest`` is the entry's, when the sender knows it already. ``on_gpu``: all that
    is not eager lies on the sender's GPU.
    """

    entry_id: Id
    transfer: Count
    inline: bool
    streaming: bool = False
    ttl_s: Annotated[float, msgspec.Meta(ge=0)] | None = 600.0
    deliveries: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = 1
    digest: Digest = b""
    on_gpu: bool = False


class Select(Request, frozen=True, tag="select"):
    """Lease the best matching entry. Body: the query's key.

    ``has_key`` is false for "any entry"; ``stream`` asks for tensors as they
    land (``open_drop_select``).
    """

    has_key: bool
    entry_id: Id | None = None
    match: Literal["prefix", "exact"] = "prefix"
    min_matched_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = 1
    stream: bool = False


class Peek(Request, frozen=True, tag="peek"):
    """How many tokens could be matched now? Body: the query's key."""

    has_key: bool


class Taken(Request, frozen=True, tag="taken"):
    """Answer when the entry has left by its last acknowledgement."""

    entry_id: Id


class Withdraw(Request, frozen=True, tag="withdraw"):
    """Remove the entry if nobody holds it."""

    entry_id: Id


class Settle(Request, frozen=True, tag="settle"):
    """Was this delivery's acknowledgement accepted? Asked after a reconnect."""

    entry_id: Id
    token: Token


class Put(Request, frozen=True, tag="put"):
    """Store one tensor by name. Body: the tensor's bytes if ``inline``.

    Without ``spec`` the name is deleted. It is void ``ttl_s`` seconds after it came; 0:
    never. With ``pin`` it is not dropped for room.
    """

    key: Name
    transfer: Count
    inline: bool
    spec: TensorSpec | None = None
    digest: Digest = b""
    ttl_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    pin: bool = False


class Get(Request, frozen=True, tag="get"):
    """Send what is stored by that name."""

    key: Name


class Delete(Request, frozen=True, tag="delete"):
    """Forget that name."""

    key: Name


class Clear(Request, frozen=True, tag="clear"):
    """Forget all names of this link's fingerprint and tenant."""


class Contains(Request, frozen=True, tag="contains"):
    """Which of these names are stored?"""

    keys: Annotated[tuple[Name, ...], msgspec.Meta(max_length=4096)]


class Stat(Request, frozen=True, tag="stat"):
    """What is stored by that name, and where?"""

    key: Name


class OpenPipe(Request, frozen=True, tag="pipe"):
    """This link is a pipe from here on. ``name`` is for groups."""

    name: Id = ""


class JoinGroup(Request, frozen=True, tag="join"):
    """That rank of a group has come, and takes pipes at ``port``. Asked of rank 0.

    On the host that it comes from: nobody is told of an address in a request.
    """

    rank: Count
    size: Count
    port: Port


class Missing(Base, frozen=True, tag="missing"):
    """Group: who has not come yet, as rank 0 knows it."""

    ranks: Annotated[tuple[Count, ...], msgspec.Meta(max_length=1024)]


class Members(Base, frozen=True, tag="members"):
    """Group: all have come. Where each rank takes pipes that say ``group_id``."""

    group_id: Id
    urls: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1024)]


class Arrived(Base, frozen=True, tag="arrived"):
    """Group: this rank is at its barrier of that number; from rank 0: all are."""

    number: Count


class Push(Request, frozen=True, tag="push"):
    """One tensor: of a streaming entry, or of a pipe.

    Either ``inline``: the body holds its bytes. Or it comes as ``transfer``, once that
    is granted, or was read where it lies: ``on_gpu`` of the sender's, or at a ``place``
    in memory that the sender has exported. There it stays until the receiver is through
    with it, and its ``digest`` is of what both sides compare of what is read so.

    On a pipe ``spec`` says what comes, or that it is the value None; each tensor that
    is not inline is a transfer of its own. ``flushed_tensors`` says of the other
    direction what a :class:`Flushed` would, if it is not 0.
    """

    transfer: Count = 0
    part: Count = 0
    inline: bool = False
    spec: TensorSpec | None = None
    digest: Digest = b""
    on_gpu: bool = False
    place: Place | None = None
    flushed_tensors: Count = 0


class Read(Base, frozen=True, tag="read"):
    """Pipe: there is room for this many more bytes and tensors.

    The first one says how much there is in all, and the others what the
    application has taken since.
    """

    nbytes: Count
    tensors: Count


class Flushed(Base, frozen=True, tag="flushed"):
    """Pipe: everything up to this many tensors is verified in our memory."""

    tensors: Count


class Offer(Base, frozen=True, tag="offer"):
    """A lease. Body: :class:`Contents`, tokens, roi, inline tensors.

    An offer that is not ``complete`` may still be retracted; its parts come as
    they land, then a :class:`Complete`. ``attempt`` counts deliveries. What is
    ``mapped`` is read where it lies. ``on_gpu``: all that is not eager lies on the
    sender's GPU.
    """

    transfer: Count
    inline: bool
    entry_id: Id = ""
    token: Token = b""
    attempt: Count = 1
    matched_tokens: Count = 0
    complete: bool = True
    mapped: MappedOffer | None = None
    on_gpu: bool = False


class Complete(Base, frozen=True, tag="complete"):
    """Every part of an offer that began incomplete has landed: it is committed."""

    transfer: Count


class Commit(Base, frozen=True, tag="commit"):
    """Every tensor of a streaming insert was pushed."""


class Retract(Base, frozen=True, tag="retract"):
    """The offer is void and the stream waits for another; or the push is void."""

    transfer: Count


class Ack(Base, frozen=True, tag="ack"):
    """The delivery was verified (plain) or used (``async with``).

    With ``confirm`` the requester can still cancel: it counts when a
    :class:`Reached` follows, or when the link is lost before one could come.
    """

    token: Token
    confirm: bool = False


class Took(Base, frozen=True, tag="took"):
    """A small delivery, or a value, was verified and is used: nothing answers it.

    The last frame of its stream, and the only one that the requester says last.
    """

    token: Token


class Noted(Base, frozen=True, tag="noted"):
    """The acknowledgement came; it counts when a :class:`Reached` follows."""


class Reached(Base, frozen=True, tag="reached"):
    """The application has the delivery from now on."""

    token: Token


class Nack(Base, frozen=True, tag="nack"):
    """The delivery is given back. ``reached``: the application had it and failed."""

    token: Token
    reached: bool = False


class Accepted(Base, frozen=True, tag="accepted"):
    """The entry is in (or was before), or the acknowledgement counted."""


class Cancel(Base, frozen=True, tag="cancel"):
    """The requester no longer wants it. Answered by the stream's last frame."""


class Cancelled(Base, frozen=True, tag="cancelled"):
    """Last frame of a cancelled stream. ``committed``: the cancel came too late."""

    committed: bool = False


class Result(Base, frozen=True, tag="result"):
    """Last frame of a question: a number, or one bit a name.

    Where there are ``tiers``, ``nearest`` has a byte for each name: which of them has
    it first; any other number: none. Of one name it is all that have it, and ``facts``
    are of what is in memory.
    """

    value: Count = 0
    flags: Annotated[tuple[bool, ...], msgspec.Meta(max_length=4096)] = ()
    tiers: Annotated[tuple[Id, ...], msgspec.Meta(max_length=64)] = ()
    nearest: Annotated[bytes, msgspec.Meta(max_length=4096)] = b""
    facts: Facts | None = None


class Failure(Base, frozen=True, tag="failure"):
    """Last frame of a stream that ended by an error; see ``protocol.failures``."""

    code: Id
    message: Text
    reason: Id = ""
    nbytes: Count = 0
    max_bytes: Count = 0


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
    | Clear
    | Contains
    | Stat
    | Pin
    | JoinGroup
    | OpenDevices
    | OpenMemory
    | OpenPipe
)

Frame: TypeAlias = (
    Hello
    | Welcome
    | Challenge
    | Proof
    | Refuse
    | Attach
    | Attached
    | Ping
    | Pong
    | Goodbye
    | OpeningFrame
    | DeviceFrame
    | Exposed
    | Proved
    | Grant
    | Sent
    | Eager
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
    | Took
    | Noted
    | Reached
    | Nack
    | Accepted
    | Pinned
    | Cancel
    | Cancelled
    | Result
    | Failure
)
