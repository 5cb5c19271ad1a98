"""What each frame does to its stream: one look into a table per frame."""

from __future__ import annotations

import enum
from typing import Final, get_args

from asynckv.protocol.frames import (
    Accepted,
    Attach,
    Attached,
    Cancelled,
    Challenge,
    Failure,
    Frame,
    Goodbye,
    Hello,
    OpeningFrame,
    Ping,
    Pong,
    Proof,
    Refuse,
    Result,
    Took,
    Welcome,
)

__all__ = ("ROLES", "Role")


class Role(enum.Enum):
    """What a frame is to its stream."""

    OPENS = "the requester begins"
    GOES_ON = "either side, in between"
    ASKS_LAST = "the requester ends it"
    ANSWERS_LAST = "the responder ends it (a pipe: a Failure only)"
    OF_THE_LINK = "on no stream"


ROLES: Final[dict[type, Role]] = {
    **dict.fromkeys(get_args(Frame), Role.GOES_ON),
    **dict.fromkeys(get_args(OpeningFrame), Role.OPENS),
    **dict.fromkeys((Accepted, Result, Failure, Cancelled), Role.ANSWERS_LAST),
    **dict.fromkeys((Hello, Challenge, Proof, Welcome, Refuse), Role.OF_THE_LINK),
    **dict.fromkeys((Attach, Attached, Ping, Pong, Goodbye), Role.OF_THE_LINK),
    Took: Role.ASKS_LAST,
}
