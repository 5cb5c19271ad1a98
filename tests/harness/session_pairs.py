"""Both sides of a session with no link between them: bytes are carried by hand."""

from __future__ import annotations

from asynckv.protocol.codec import encode_frame
from asynckv.protocol.frames import Frame, Get
from asynckv.protocol.session import Event, Session
from asynckv.protocol.values import Limits

__all__ = ("ask", "far", "hear", "near", "pump")


def near(limits: Limits | None = None) -> Session[str]:
    """Return the side that dialled: its streams are odd."""
    return Session(limits or Limits(), dialled=True)


def far(limits: Limits | None = None) -> Session[str]:
    """Return the side that was dialled: its streams are even."""
    return Session(limits or Limits(), dialled=False)


def ask(session: Session[str], owner: str = "asker") -> int:
    """Open a stream of its own, and return its number.

    :raises LocalProtocolError: too many are open, or it has used them up
    """
    return session.open(owner, Get("k"))


def pump(source: Session[str], sink: Session[str]) -> list[Event[str]]:
    """Carry all that ``source`` has to say to ``sink``, as a link does.

    :raises RemoteProtocolError: as :meth:`asynckv.protocol.session.Session.receive`
    """
    events: list[Event[str]] = []
    while source.outbox:
        events += sink.receive(source.outbox.take(100_000))
    return events


def hear(session: Session[str], stream: int, frame: Frame, body: bytes = b"") -> None:
    """Let it receive one frame of a peer that says what it likes.

    :raises RemoteProtocolError: as :meth:`asynckv.protocol.session.Session.receive`
    """
    list(session.receive(encode_frame(stream, frame, body)[0]))
