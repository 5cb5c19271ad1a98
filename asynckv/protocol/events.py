"""What a session tells its link: one for each received frame."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import msgspec

from asynckv.errors import AsyncKVError
from asynckv.protocol.frames import Frame, OpeningFrame

__all__ = ("Came", "Event", "Farewell", "Nothing", "Opened", "Refused")

T = TypeVar("T")


class Opened(msgspec.Struct, frozen=True, gc=False):
    """The peer opens a stream; attach something to it, or it is ignored."""

    stream: int
    frame: OpeningFrame
    body: bytes


class Came(msgspec.Struct, Generic[T], frozen=True):
    """A frame for the stream to which ``owner`` was attached.

    Unlike others it is seen by the garbage collector: an owner that keeps an error
    keeps the frames of its traceback, and these the event.
    """

    owner: T
    frame: Frame
    body: bytes


class Farewell(NamedTuple):
    """The peer closes cleanly; nothing follows."""

    reason: str


class Refused(NamedTuple):
    """The peer says that we broke the rules; nothing follows."""

    error: AsyncKVError


class Nothing(NamedTuple):
    """A frame that nobody else need hear of, as a ping."""


Event = Opened | Came[T] | Farewell | Refused | Nothing
