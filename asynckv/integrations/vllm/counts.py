"""What the roles count between two reports to vLLM. Plain numbers only.

Requests are counted where they are known, once, whatever the number of ranks; bytes
and blocks by each rank, its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from asynckv.abc import KVConnectorMetadata

__all__ = ("COUNTERS", "GAUGES", "added", "gauges_of", "saved_by", "summary")

COUNTERS: Final = {
    "loads": "Requests whose KV was loaded, on all ranks.",
    "failed_loads": "Requests whose KV should have come, and did not on all ranks.",
    "loaded_bytes": "Bytes of KV loaded, of all ranks.",
    "saves": "Prompts that were saved for another engine, on all ranks.",
    "failed_saves": "Prompts that should have been saved, and were not on all ranks.",
    "saved_bytes": "Bytes of KV saved, of all ranks.",
    "saved_blocks": "Blocks that were put in a store, of all ranks.",
    "unsaved_blocks": "Blocks that should have been, and failed or were skipped.",
}
"""What only grows, and what it is."""

GAUGES: Final = {
    "waiting_bytes": "Bytes of KV that wait here for another engine, of all ranks.",
    "waiting_entries": "Prompts' parts that wait here, one a rank and prompt.",
    "links": "Links to other engines, or to the store, that are up, of all ranks.",
    "store_reachable": "1 while the store answers lookups, 0 while it does not.",
}
"""What goes up and down, and what it is."""


def added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return both together; ``load_seconds`` has one number a load.

    ``gauges`` has what each rank, or the scheduler, said last: ``other`` is the later.
    """
    total: dict[str, Any] = {
        name: one.get(name, 0) + other.get(name, 0) for name in COUNTERS
    }
    seconds = [*one.get("load_seconds", ()), *other.get("load_seconds", ())]
    gauges = {**one.get("gauges", {}), **other.get("gauges", {})}
    return total | {"load_seconds": seconds, "gauges": gauges}


def gauges_of(statistics: object) -> dict[str, int]:
    """Return what one side of a connector has now, of that what its kind has."""
    found: dict[str, int] = {}
    if (links := getattr(statistics, "links", None)) is not None:
        found["links"] = int(links)
    if (buffer := getattr(statistics, "buffer", None)) is not None:
        found["waiting_bytes"] = int(buffer.used_bytes)
        found["waiting_entries"] = int(buffer.entries)
    if (is_reachable := getattr(statistics, "is_reachable", None)) is not None:
        found["store_reachable"] = int(is_reachable)
    return found


def saved_by(orders: KVConnectorMetadata) -> frozenset[str]:
    """Return whose prompts a step saves, and does not refuse to."""
    saves = getattr(orders, "saves", ())
    return frozenset(
        [one.request_id for one in saves if not getattr(one, "refusal", "")]
    )


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
        "Saved blocks": counts.get("saved_blocks", 0),
        "Unsaved blocks": counts.get("unsaved_blocks", 0),
    }
