"""What a worker's role counts between two reports to vLLM. Plain numbers only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ("COUNTERS", "added", "summary")

COUNTERS: Final = {
    "loads": "Requests whose KV was loaded from another engine.",
    "failed_loads": "Requests whose KV should have been loaded, and was not.",
    "loaded_bytes": "Bytes of KV loaded.",
    "saves": "Requests whose KV was saved for another engine.",
    "failed_saves": "Requests whose KV should have been saved, and was not.",
    "saved_bytes": "Bytes of KV saved.",
}
"""What only grows, and what it is."""


def added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return both together; ``load_seconds`` has one number a load."""
    total: dict[str, Any] = {
        name: one.get(name, 0) + other.get(name, 0) for name in COUNTERS
    }
    seconds = [*one.get("load_seconds", ()), *other.get("load_seconds", ())]
    return total | {"load_seconds": seconds}


def summary(counts: Mapping[str, Any]) -> dict[str, int | float]:
    """Return what one line of a log can say."""
    seconds = sorted(counts.get("load_seconds", ()))
    middle = seconds[len(seconds) // 2] if seconds else 0.0
    return {
        "Loads": counts.get("loads", 0),
        "Failed loads": counts.get("failed_loads", 0),
        "Loaded MB": round(counts.get("loaded_bytes", 0) / 1e6, 3),
        "Median load (ms)": round(middle * 1e3, 3),
        "Longest load (ms)": round(seconds[-1] * 1e3, 3) if seconds else 0.0,
        "Saves": counts.get("saves", 0),
        "Failed saves": counts.get("failed_saves", 0),
        "Saved MB": round(counts.get("saved_bytes", 0) / 1e6, 3),
    }
