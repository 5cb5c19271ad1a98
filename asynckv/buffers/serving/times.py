"""How long the requests of all links take at a server, from frame to answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from asynckv.links.link import LinkStream, RequestTiming
from asynckv.observability.latencies import Latencies
from asynckv.protocol.frames import (
    Accepted,
    Contains,
    Get,
    Insert,
    Offer,
    OpeningFrame,
    Put,
    Result,
    Select,
)

__all__ = ("RequestTimes",)

_TIMED: Final[Mapping[type, tuple[str, type]]] = {
    Contains: ("contains", Result),
    Get: ("get", Result),
    Insert: ("insert", Accepted),
    Put: ("put", Accepted),
    Select: ("drop_select", Offer),
}
"""The requests that are timed, and the frame that ends the time."""


class RequestTimes:
    """Histograms by what is asked for: ``"get"``, ``"drop_select"`` and so on.

    A get lasts until its value is verified at the peer, a put until the value is
    stored, an insert until the entry is in, a drop_select until there is a match. What
    was cancelled, failed or was cut off is not counted.
    """

    def __init__(self) -> None:
        self._timings = {
            opening: RequestTiming(ended_by)
            for opening, (_, ended_by) in _TIMED.items()
        }

    def begin(self, stream: LinkStream, frame: OpeningFrame) -> None:
        """The time of the request begins now, if it is one that is timed."""
        stream.timing = self._timings.get(type(frame))
        stream.began_s = time.perf_counter()

    def latencies(self) -> dict[str, Latencies]:
        """Return what was counted so far."""
        return {_TIMED[one][0]: t.latencies() for one, t in self._timings.items()}
