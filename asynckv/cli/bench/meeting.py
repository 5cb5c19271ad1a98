"""What the two sides of a bench say to each other beside asynckv's own protocol.

The serving side puts a :class:`Meeting` into its store, where only those read it that
the link has let in; its token opens the raw sockets of the baselines, which hand out
nothing but constant bytes.
"""

from __future__ import annotations

import enum
import struct
from typing import Final

import msgspec
import numpy
import torch

__all__ = (
    "MAX_NBYTES",
    "MAX_PARTS",
    "MEETING_KEY",
    "ORDER",
    "PING_NBYTES",
    "TOKEN_NBYTES",
    "Meeting",
    "What",
    "meeting_as_tensor",
    "meeting_from",
    "read_order",
)

MEETING_KEY: Final = "asynckv bench"
TOKEN_NBYTES: Final = 32
PING_NBYTES: Final = 64
MAX_NBYTES: Final = 128 * 2**20
"""Memory of a raw socket's other end, and so the largest part that one moves."""
MAX_PARTS: Final = 2**20
ORDER: Final = struct.Struct("!BxxxIQ")
"""What to do, with how many parts, of how many bytes each."""


class What(enum.IntEnum):
    """Orders to a raw socket."""

    PULL = 1
    PUSH = 2
    CPU = 3


class Meeting(msgspec.Struct, frozen=True):
    """Where the baselines of a serving side are."""

    raw_port: int
    streams_port: int
    echo_port: int
    token: bytes


def meeting_as_tensor(meeting: Meeting) -> torch.Tensor:
    """Return the meeting as a store takes it."""
    encoded = msgspec.msgpack.encode(meeting)
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def meeting_from(tensor: torch.Tensor) -> Meeting:
    """Return what the serving side had put there.

    :raises ValueError: it is no meeting
    """
    encoded = tensor.numpy().view(numpy.uint8).tobytes()
    meeting = msgspec.msgpack.decode(encoded, type=Meeting)
    ports = (meeting.raw_port, meeting.streams_port, meeting.echo_port)
    if len(meeting.token) != TOKEN_NBYTES or not all(0 < p < 65536 for p in ports):
        raise ValueError(f"no meeting: ports {ports}")
    return meeting


def read_order(packed: bytes) -> tuple[What, int, int]:
    """Return what to do, the number of parts and the bytes of each.

    :raises ValueError: no order, or one beyond what this side has memory for
    """
    what, parts, nbytes = ORDER.unpack(packed)
    if parts > MAX_PARTS or nbytes > MAX_NBYTES:
        raise ValueError(f"{parts} parts of {nbytes} bytes")
    return What(what), parts, nbytes
