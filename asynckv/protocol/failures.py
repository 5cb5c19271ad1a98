"""Errors on the wire: what one side raised, raised again on the other.

Only errors in the table cross, by the name of their class. Anything else is a
fault of the side where it happened and becomes a plain sentence. Paths,
addresses and object ids never leave this process, but for what a fingerprint says:
a peer is told that in any case.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, TypeAlias

from asynckv import errors
from asynckv.errors import (
    AsyncKVError,
    EntryAborted,
    EntryTooLarge,
    IncompatiblePeer,
    LocalProtocolError,
    RemoteProtocolError,
)
from asynckv.observability.lines import as_line
from asynckv.protocol.frames import Cancelled, Failure, Frame, Refuse
from asynckv.types import KVFingerprint

__all__ = (
    "PeerError",
    "fail_by",
    "from_failure",
    "from_refuse",
    "to_failure",
    "to_refuse",
)

PeerError: TypeAlias = AsyncKVError | KeyError | ValueError

_MAX_ID: Final = 256
_MAX_TEXT: Final = 2048
_UNKNOWN: Final = "the peer failed; its log says why"

_TABLE: Final[dict[str, type[AsyncKVError]]] = {
    name: getattr(errors, name) for name in errors.__all__
}
# What the peer did wrong, as it says, is what we did wrong.
_MIRRORED: Final[dict[type[BaseException], type[AsyncKVError]]] = {
    LocalProtocolError: RemoteProtocolError,
    RemoteProtocolError: LocalProtocolError,
}
_PRIVATE: Final = re.compile(
    r"0x[0-9a-fA-F]+"  # where an object lives
    r"|(?<![\w.:/])(?:~|\.{1,2})?/[\w.@+-]+(?:/[\w.@+-]+)*/?"  # a path
    r"|\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b"  # an IPv4 address
    r"|\[[0-9a-fA-F:]+\](?::\d+)?"  # an IPv6 address
    r"|\b(?:tcp|unix|tls|mem)://\S+"
)


def _publish(text: str) -> str:
    return _PRIVATE.sub("...", text)[:_MAX_TEXT]


def to_failure(exc: BaseException) -> Failure:
    """Return the frame that tells the peer of ``exc``."""
    if isinstance(exc, KeyError):
        return Failure("KeyError", _publish(str(exc.args[0]) if exc.args else ""))
    if isinstance(exc, ValueError):
        return Failure("ValueError", _publish(str(exc)))
    if not isinstance(exc, AsyncKVError):
        return Failure("AsyncKVError", _UNKNOWN)
    code = _MIRRORED.get(type(exc), type(exc)).__name__
    code = code if code in _TABLE else "AsyncKVError"
    is_of_fingerprint = (
        isinstance(exc, IncompatiblePeer)
        and exc.field in KVFingerprint.__struct_fields__
    )
    message = exc.message[:_MAX_TEXT] if is_of_fingerprint else _publish(exc.message)
    if isinstance(exc, EntryTooLarge):
        return Failure(code, message, nbytes=exc.nbytes, max_bytes=exc.max_bytes)
    if isinstance(exc, EntryAborted):
        return Failure(code, message, reason=exc.reason[:_MAX_ID])
    if isinstance(exc, IncompatiblePeer):
        return Failure(code, message, reason=exc.field[:_MAX_ID])
    return Failure(code, message)


def from_failure(failure: Failure) -> PeerError:
    """Return the exception that ``failure`` tells of. Never raises."""
    if failure.code == "KeyError":
        return KeyError(failure.message)  # which shows its key as a repr does
    message, reason = as_line(failure.message), as_line(failure.reason)
    if failure.code == "ValueError":
        return ValueError(message)
    kind = _TABLE.get(failure.code, AsyncKVError)
    if issubclass(kind, EntryTooLarge):
        return kind(message, nbytes=failure.nbytes, max_bytes=failure.max_bytes)
    if issubclass(kind, EntryAborted):
        return kind(message, reason=reason)
    if issubclass(kind, IncompatiblePeer):
        return kind(message, field=reason)
    return kind(message)


def to_refuse(exc: BaseException) -> Refuse:
    """Return the frame that tells the peer why it is not let in, or no longer."""
    failure = to_failure(exc)
    return Refuse(failure.code, failure.message, field=failure.reason)


def from_refuse(refuse: Refuse) -> AsyncKVError:
    """Return the exception that ``refuse`` tells of. Never raises."""
    error = from_failure(Failure(refuse.code, refuse.message, reason=refuse.field))
    if isinstance(error, AsyncKVError):
        return error
    return AsyncKVError(as_line(refuse.message))


def fail_by(frame: Frame, request: str, fail: Callable[[Exception], None]) -> None:
    """Call ``fail`` with what a frame means to ``request`` that is no answer to it.

    :raises RemoteProtocolError: it makes no sense at all
    """
    match frame:
        case Failure():
            fail(from_failure(frame))
        case Cancelled():
            fail(AsyncKVError(f"the peer gave the {request} up"))
        case _:
            error = RemoteProtocolError(f"no {type(frame).__name__} belongs here")
            fail(error)  # of a last frame's stream nobody else is told
            raise error
