"""What goes wrong between two peers, to be put between yours: ``latency(url, 0.05)``.

None of it needs torch. ``docs/testing.md`` says what each fault models.
"""

from __future__ import annotations

from asynckv.testing.faults.fault import Cut, Direction, Fault, FaultCounts, Kind
from asynckv.testing.faults.injectors import Injectors
from asynckv.testing.faults.processes import frozen_peer
from asynckv.testing.faults.proxy import (
    Proxy,
    ProxyCounts,
    bit_flip,
    black_hole,
    cut_after,
    half_close,
    latency,
    rate,
    reset,
    stall,
    tiny_slices,
)

__all__ = (
    "Cut",
    "Direction",
    "Fault",
    "FaultCounts",
    "Injectors",
    "Kind",
    "Proxy",
    "ProxyCounts",
    "bit_flip",
    "black_hole",
    "cut_after",
    "frozen_peer",
    "half_close",
    "latency",
    "rate",
    "reset",
    "stall",
    "tiny_slices",
)
