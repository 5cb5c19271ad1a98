"""What two peers agree on: one Hello, one Welcome, or a Refuse.

Plain functions over values; :mod:`asynckv.protocol.hello` has their order.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Literal, TypeAlias

from asynckv.errors import (
    AsyncKVError,
    AuthError,
    IncompatiblePeer,
    LocalProtocolError,
    RemoteProtocolError,
)
from asynckv.observability.lines import as_line
from asynckv.protocol.codec import encode_frame
from asynckv.protocol.failures import from_refuse
from asynckv.protocol.frames import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Frame,
    Hello,
    Refuse,
    Welcome,
)
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.types import KVFingerprint

__all__ = (
    "GREETING_LIMITS",
    "MAX_LANES",
    "ONE_FINGERPRINT",
    "WELCOME_LIMITS",
    "Agreement",
    "DigestMode",
    "Terms",
    "accept_welcome",
    "agree",
    "check_version",
    "encode_hello",
    "hello_from",
    "refusal",
    "strictest",
    "welcome_to",
)

DigestMode: TypeAlias = Literal["full", "edges", "off"]

GREETING_LIMITS: Final = Limits(max_control_bytes=3072, max_body_bytes=0)
"""What is read from somebody who is not let in yet: a first frame, and a proof.

Together, with their headers, they are no longer than 4 KiB.
"""
WELCOME_LIMITS: Final = Limits(max_control_bytes=16 * 1024, max_body_bytes=0)
"""What is read from somebody whom we have dialled."""
MAX_LANES: Final = 8
ONE_FINGERPRINT: Final = (
    "only one side has a fingerprint: KV of peer %s never matches ours"
)
"""What is logged where a lookup buffer is used over such a link."""
_DEFAULT_LIMITS: Final = Limits()

_LEAST: Final = {
    "max_control_bytes": 4096,
    "max_body_bytes": 64 * 1024,
    "max_chunk_bytes": 4096,
    "max_streams": 1,
    "heartbeat_ms": 10,
    "max_requests_per_s": 1,
    "max_cancels_per_s": 1,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """What one side brings to the handshake. ``payload_paths``: best first."""

    identity: PeerIdentity
    payload_paths: tuple[str, ...]
    limits: Limits = _DEFAULT_LIMITS
    fingerprint: KVFingerprint | None = None
    digest: DigestMode = "full"
    lanes: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """What both sides keep to. ``limits`` is the smaller of each.

    ``has_one_fingerprint``: entries of a lookup buffer of one side never match what
    the other looks for. Values of a store are each user's own. ``certified_names`` are
    all that the peer has proved to have.
    """

    peer: PeerIdentity
    limits: Limits
    peer_limits: Limits
    fingerprint: KVFingerprint | None
    payload_path: str
    payload_description: bytes
    lanes: int
    digest: DigestMode
    has_one_fingerprint: bool = False
    certified_names: tuple[str, ...] = ()


def hello_from(terms: Terms, nonce: bytes = b"") -> Hello:
    """Return the dialling side's first frame."""
    return Hello(
        PROTOCOL_MAJOR,
        PROTOCOL_MINOR,
        terms.identity,
        terms.limits,
        terms.payload_paths,
        terms.lanes,
        digest=terms.digest,
        fingerprint=terms.fingerprint,
        nonce=nonce,
    )


def encode_hello(hello: Hello) -> bytes:
    """Return the bytes of the first frame.

    :raises LocalProtocolError: it is longer than a stranger may send
    """
    try:
        return encode_frame(0, hello, limits=GREETING_LIMITS)[0]
    except LocalProtocolError as exc:
        raise LocalProtocolError(
            exc.message, hint="shorten the fingerprint: its fields may be hashes"
        ) from exc


def agree(terms: Terms, theirs: Hello | Welcome) -> Agreement:
    """Return what both sides keep to: the same on either side.

    :raises IncompatiblePeer: they cannot exchange KV; ``field`` says over what
    """
    check_version(theirs)
    _check_fingerprints(terms.fingerprint, theirs)
    return Agreement(
        peer=theirs.identity,
        limits=_smaller(terms.limits, theirs.limits),
        peer_limits=theirs.limits,
        fingerprint=theirs.fingerprint,
        payload_path=_choose_path(terms.payload_paths, theirs),
        payload_description=theirs.payload_description,
        lanes=max(1, min(terms.lanes, theirs.lanes, MAX_LANES)),
        digest=strictest(terms.digest, theirs.digest),
        has_one_fingerprint=(terms.fingerprint is None)
        is not (theirs.fingerprint is None),
    )


def welcome_to(
    terms: Terms,
    agreement: Agreement,
    *,
    link_token: bytes,
    payload_description: bytes,
) -> Welcome:
    """Return the listening side's answer to a Hello that was agreed to."""
    return Welcome(
        PROTOCOL_MAJOR,
        PROTOCOL_MINOR,
        terms.identity,
        terms.limits,
        agreement.payload_path,
        agreement.lanes,
        link_token,
        digest=agreement.digest,
        fingerprint=terms.fingerprint,
        payload_description=payload_description,
    )


def accept_welcome(terms: Terms, answer: Frame) -> tuple[Agreement, Welcome]:
    """Read the answer to our Hello.

    :raises IncompatiblePeer: they cannot exchange KV; ``field`` says over what
    :raises AsyncKVError: the peer refuses us, for another reason
    :raises RemoteProtocolError: it is no answer to a Hello
    """
    if isinstance(answer, Refuse):
        raise refusal(answer)
    if not isinstance(answer, Welcome):
        raise RemoteProtocolError(f"{type(answer).__name__} in answer to a Hello")
    agreement = agree(terms, answer)
    if agreement.lanes != answer.lanes or agreement.digest != answer.digest:
        raise RemoteProtocolError("the Welcome is not what was offered")
    return agreement, answer


def strictest(ours: DigestMode, theirs: DigestMode) -> DigestMode:
    """Return which digests are made when two sides want different ones."""
    order: tuple[DigestMode, ...] = ("full", "edges", "off")
    return min(ours, theirs, key=order.index)


def refusal(refuse: Refuse) -> AsyncKVError:
    """Return what a side that was refused raises."""
    error = from_refuse(refuse)
    if isinstance(error, AuthError):
        return AuthError(
            f"the peer refuses us: {error.message}",
            hint="both sides need the same secret, or certificates of one authority",
        )
    if isinstance(error, LocalProtocolError):
        return LocalProtocolError(f"the peer refuses us: {error.message}")
    return error


def check_version(theirs: Hello | Welcome) -> None:
    """Refuse whoever speaks another protocol, before anything else is looked at.

    :raises IncompatiblePeer: the major versions differ
    """
    if theirs.major != PROTOCOL_MAJOR:
        raise IncompatiblePeer(
            f"protocol {theirs.major}.{theirs.minor} there, "
            f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR} here",
            field="major",
            hint="run the same release of asynckv on both sides",
        )


def _check_fingerprints(ours: KVFingerprint | None, theirs: Hello | Welcome) -> None:
    if ours is None or theirs.fingerprint is None:
        return
    field = ours.difference(theirs.fingerprint)
    if field is not None:
        here, there = getattr(ours, field), getattr(theirs.fingerprint, field)
        # In the message, for of a peer's errors no hint is sent.
        alike = (
            "; if it is one model, give both sides the same option 'fingerprint'"
            if field == "model"
            else ""
        )
        raise IncompatiblePeer(
            f"the fingerprints differ in {field!r}: {here!r:.200} and "
            f"{there!r:.200}{alike}",
            field=field,
            hint="KV of one is wrong for the other; connect equal models and layouts",
        )


def _choose_path(ours: tuple[str, ...], theirs: Hello | Welcome) -> str:
    offered = (
        theirs.payload_paths if isinstance(theirs, Hello) else (theirs.payload_path,)
    )
    for path in ours:
        if path in offered:
            return path
    raise IncompatiblePeer(
        f"no payload path in common: {', '.join(ours)} here, "
        f"{as_line(', '.join(offered), max_chars=200)} there",
        field="payload_paths",
    )


def _smaller(ours: Limits, theirs: Limits) -> Limits:
    fields = Limits.__struct_fields__
    limits = Limits(**{f: min(getattr(ours, f), getattr(theirs, f)) for f in fields})
    for field, least in _LEAST.items():
        if getattr(limits, field) < least:
            raise IncompatiblePeer(
                f"{field} is {getattr(limits, field)}; no link works below {least}",
                field=f"limits.{field}",
            )
    return limits
