"""How long the requests of all links take at a server, from frame to answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from asynckv.links.link import LinkStream, RequestTiming, TimedStream
from asynckv.observability.latencies import Latencies
from asynckv.protocol.frames import (
    Accepted,
    Contains,
    Get,
    Insert,
    OpeningFrame,
    Put,
    Result,
)

__all__ = ("RequestTimes",)

_TIMED: Final[Mapping[type, tuple[str, type]]] = {
    Contains: ("contains", Result),
    Get: ("get", Result),
    Insert: ("insert", Accepted),
    Put: ("put", Accepted),
}
"""The requests that are timed, and the frame that ends the time."""


class RequestTimes:
    """Histograms by what is asked for: ``"get"``, ``"insert"`` and so on.

    A get lasts until its value is verified at the peer, a put until the value is
    stored, an insert until the entry is in. What was cancelled, failed or was cut off
    is not counted, nor is what waits for a match: that takes as long as nobody inserts.
    """

    def __init__(self) -> None:
        self._timings = {
            opening: RequestTiming(ended_by)
            for opening, (_, ended_by) in _TIMED.items()
        }

    def begin(self, stream: LinkStream, frame: OpeningFrame) -> LinkStream:
        """The time of the request begins now, if it is one that is timed.

        Returns the stream that it is to be answered by.
        """
        timing = self._timings.get(type(frame))
        if timing is None:
            return stream
        began_s = time.perf_counter()
        return TimedStream(
            *(stream.link, stream._session, stream._outgoing, stream.id),
            timing=timing,
            began_s=began_s,
        )

    def latencies(self) -> dict[str, Latencies]:
        """Return what was counted so far."""
        return {_TIMED[one][0]: t.latencies() for one, t in self._timings.items()}
