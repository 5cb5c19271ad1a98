"""What two sides said to each other, byte by byte: :class:`Tap` listens in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from asynckv.protocol.codec import FrameDecoder
from asynckv.protocol.frames import Frame
from asynckv.protocol.wire import TYPE_CHUNK
from asynckv.testing.faults.fault import Fault
from asynckv.testing.faults.proxy import Proxy
from harness.fuzzing.wire_frames import WireFrame, split

if TYPE_CHECKING:
    from asynckv.testing.faults.fault import Flow

__all__ = ("Connection", "Recording", "Segment", "Tap", "heard")


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that passed at a time, on one connection in one direction."""

    connection: int
    to_listener: bool
    data: bytes


class Connection(msgspec.Struct, frozen=True):
    """One connection, whole: each side's bytes, and in which order they passed."""

    number: int
    segments: tuple[Segment, ...]

    def said(self, *, to_listener: bool) -> bytes:
        """Return everything that one side said."""
        return b"".join(s.data for s in self.segments if s.to_listener == to_listener)

    def frames(self, *, to_listener: bool) -> list[WireFrame]:
        """Return the wire frames and chunks that one side sent."""
        return list(split(self.said(to_listener=to_listener)))

    @property
    def is_lane(self) -> bool:
        """Whether it carries chunks."""
        return any(
            frame.header.type == TYPE_CHUNK
            for to_listener in (True, False)
            for frame in self.frames(to_listener=to_listener)
        )


class Recording(msgspec.Struct, frozen=True):
    """Connections, as they were recorded."""

    segments: tuple[Segment, ...]

    @property
    def connections(self) -> tuple[Connection, ...]:
        """Every connection on which anything was said."""
        numbers = dict.fromkeys(segment.connection for segment in self.segments)
        return tuple(
            Connection(n, tuple(s for s in self.segments if s.connection == n))
            for n in numbers
        )

    @property
    def nbytes(self) -> int:
        """How many bytes passed in all."""
        return sum(len(segment.data) for segment in self.segments)

    def control(self) -> list[bytes]:
        """Return what each side said on each control connection."""
        return [
            said
            for connection in self.connections
            if not connection.is_lane
            for to_listener in (True, False)
            if (said := connection.said(to_listener=to_listener))
        ]

    def frames(self) -> Iterator[tuple[Frame, bytes]]:
        """Yield every control frame with its body."""
        for said in self.control():
            for _, frame, body in FrameDecoder().feed(said):
                yield frame, body

    def save(self, path: Path) -> None:
        """Write it to a file."""
        path.write_bytes(msgspec.msgpack.encode(self))

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what :meth:`save` has written.

        :raises msgspec.MsgspecError: it is something else
        """
        return msgspec.msgpack.decode(path.read_bytes(), type=cls)

    @classmethod
    def joined(cls, recordings: Sequence[Recording]) -> Recording:
        """Return one with all their connections."""
        segments: list[Segment] = []
        first = 0
        for recording in recordings:
            segments += [
                Segment(first + s.connection, s.to_listener, s.data)
                for s in recording.segments
            ]
            first = 1 + max((s.connection for s in segments), default=-1)
        return cls(tuple(segments))


class Tap(Fault):
    """No fault: it keeps what passes, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._segments: list[Segment] = []

    @property
    def recording(self) -> Recording:
        """What has passed so far."""
        return Recording(tuple(self._segments))

    def change(self, flow: Flow, data: bytes) -> bytes:
        segment = Segment(flow.number, flow.direction == "to_listener", data)
        self._segments.append(segment)
        self.note(flow, acts=1, nbytes=len(data))
        return data


async def heard(url: str, play: Callable[[str, Tap], Awaitable[None]]) -> Recording:
    """Listen in while ``play`` uses the way to ``url`` that it is given."""
    async with Proxy(url) as proxy:
        tap = proxy.add(Tap())
        tap.begin()
        await play(proxy.url, tap)
    return tap.recording
