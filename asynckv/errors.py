"""Every exception that asynckv raises, on one page.

- ``AsyncKVError``: something the world did

  - ``ConfigError``: a configuration that cannot work

    - ``NotServed``: the peer serves buffers of other kinds alone
  - ``WrongRole``: a producer's verb on a consumer, or the other way round
  - ``WrongLoop``: an object used from another event loop or thread
  - ``ProtocolError``: the rules of the wire were broken

    - ``LocalProtocolError``: by us
    - ``RemoteProtocolError``: by the peer
  - ``AuthError``: the peer could not prove who it is
  - ``IncompatiblePeer``: the peer speaks another version or holds another model
  - ``PeerLost``: the connection ended without a goodbye

    - ``PipeBroken``: on a pipe, with tensors that may or may not have arrived
  - ``PeerRestarted``: the peer came back without its memory
  - ``EndOfStream``: the peer said goodbye
  - ``BufferClosed``: the buffer was closed
  - ``EntryTooLarge``: could never fit
  - ``EntryAborted``: the entry left before it was taken
  - ``EntryConflict``: one entry id, two contents
  - ``LeaseLost``: the entry was taken back meanwhile
  - ``Overloaded``: the peer keeps as many requests as it may
  - ``ChecksumError``: bytes changed on their way
  - ``GPUUnavailable``: CuPy, NCCL or a driver is missing
  - ``GPUFailed``: a call of CUDA or NCCL failed

A wrong argument stays ``ValueError`` or ``TypeError``, a second use
``RuntimeError``, a timeout ``TimeoutError`` and a cancellation
``asyncio.CancelledError``.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = (
    "AsyncKVError",
    "AuthError",
    "BufferClosed",
    "ChecksumError",
    "ConfigError",
    "EndOfStream",
    "EntryAborted",
    "EntryConflict",
    "EntryTooLarge",
    "GPUFailed",
    "GPUUnavailable",
    "IncompatiblePeer",
    "LeaseLost",
    "LocalProtocolError",
    "NotServed",
    "Overloaded",
    "PeerLost",
    "PeerRestarted",
    "PipeBroken",
    "ProtocolError",
    "RemoteProtocolError",
    "WrongLoop",
    "WrongRole",
)


class AsyncKVError(Exception):
    """The root of what the world does to a transfer.

    ``hint`` says what to do next; it is part of ``str(error)`` when it is set.
    """

    hint: str = ""

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        super().__init__(message)
        if hint is not None:
            self.hint = hint

    def __str__(self) -> str:
        message = super().__str__() or (type(self).__doc__ or "").strip().split("\n")[0]
        return f"{message} ({self.hint})" if self.hint else message

    @property
    def message(self) -> str:
        """The text without the hint."""
        return super().__str__()


class ConfigError(AsyncKVError):
    """The configuration cannot work as it stands.

    ``problems`` are all the things that were found wrong with it, each with its hint.
    """

    def __init__(
        self,
        message: str = "",
        *,
        hint: str | None = None,
        problems: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, hint=hint)
        self.problems = problems or (str(self),)

    @classmethod
    def of(cls, errors: Sequence[ConfigError]) -> ConfigError:
        """Return one error that names what all of ``errors`` name."""
        if len(errors) == 1:
            return errors[0]
        named = (problem for error in errors for problem in error.problems)
        problems = tuple(dict.fromkeys(named))
        return cls("; ".join(problems), problems=problems)


class NotServed(ConfigError):
    """The peer serves no buffer of this kind."""


class WrongRole(AsyncKVError):
    """This node's role does not have that verb."""

    hint = "a kv_producer inserts, a kv_consumer selects, a kv_both does both"


class WrongLoop(AsyncKVError):
    """The object belongs to another event loop or thread."""

    hint = (
        "use each object on the loop that used it first; "
        "other threads: asyncio.run_coroutine_threadsafe(..., that_loop)"
    )


class ProtocolError(AsyncKVError):
    """The rules of the wire were broken; the link is closed for ever."""


class LocalProtocolError(ProtocolError):
    """We tried to say what the protocol does not allow."""


class RemoteProtocolError(ProtocolError):
    """The peer said what the protocol does not allow."""


class AuthError(AsyncKVError):
    """The peer could not prove who it is."""


class IncompatiblePeer(AsyncKVError):
    """The peer cannot exchange KV with us; ``field`` names what differs."""

    def __init__(
        self, message: str = "", *, field: str = "", hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.field = field


class PeerLost(AsyncKVError, ConnectionError):
    """The connection to the peer ended without a goodbye.

    Where the end of a link is told to those who use it, ``goodbye`` says that
    one of the two sides closed it cleanly.
    """

    goodbye: bool = False


class PipeBroken(PeerLost):
    """The pipe broke; ``maybe_delivered`` counts sent tensors of unknown fate."""

    def __init__(
        self, message: str = "", *, maybe_delivered: int = 0, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.maybe_delivered = maybe_delivered


class PeerRestarted(AsyncKVError):
    """The peer came back as another incarnation: what it held is gone."""


class EndOfStream(AsyncKVError):
    """The peer said goodbye; there is nothing more to receive."""


class BufferClosed(AsyncKVError):
    """The buffer is closed, or was closed meanwhile."""


class EntryTooLarge(AsyncKVError):
    """``nbytes`` could never fit in ``max_bytes``."""

    hint = "raise max_bytes or split the entry"

    def __init__(
        self,
        message: str = "",
        *,
        nbytes: int = 0,
        max_bytes: int = 0,
        hint: str | None = None,
    ) -> None:
        text = message or f"{nbytes} bytes can never fit in {max_bytes}"
        super().__init__(text, hint=hint)
        self.nbytes = nbytes
        self.max_bytes = max_bytes


_WHY_GONE = {
    "ttl": "its ttl_s passed before anybody took it",
    "withdrawn": "it was withdrawn",
    "max_deliver": "max_deliver consumers of it failed",
    "producer": "its producer failed, or was cancelled, before it was whole",
    "closed": "its buffer was closed",
    "taken": "others have taken it",
}


class EntryAborted(AsyncKVError):
    """The entry left before its last acknowledgement; ``reason`` says why.

    ``reason`` is ``"ttl"``, ``"withdrawn"``, ``"max_deliver"``, ``"producer"``
    or ``"closed"``; ``"taken"`` where it is asked for by its id, and others have it.
    """

    def __init__(
        self, message: str = "", *, reason: str = "", hint: str | None = None
    ) -> None:
        why = _WHY_GONE.get(reason, reason)
        super().__init__(message or f"the entry is gone: {why}", hint=hint)
        self.reason = reason


class EntryConflict(AsyncKVError):
    """The entry id is known already, with other contents.

    An ``insert`` that finds another one under its id under way waits for that one's
    end, and is then compared. So does ``open_insert``, which cannot be compared: any
    entry that is known under its id is a conflict.
    """


class LeaseLost(AsyncKVError):
    """The lease ended meanwhile; the entry may be somebody else's by now."""


class Overloaded(AsyncKVError):
    """The peer keeps as many bytes of requests as it may; this one was refused."""

    hint = (
        "nothing was done: call again when others have ended, or give the server more "
        "by serve(max_waiting_bytes=...)"
    )


class ChecksumError(AsyncKVError):
    """The bytes that arrived are not the bytes that were sent."""


class GPUUnavailable(AsyncKVError):
    """CuPy, NCCL or a CUDA driver is missing."""

    hint = 'in a checkout of asynckv: python -m pip install ".[cuda12]"'


class GPUFailed(AsyncKVError):
    """A call of CUDA or NCCL failed; ``code`` is what it returned."""

    def __init__(
        self, message: str = "", *, code: int = 0, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
