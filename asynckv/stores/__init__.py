"""Stores that outgrow a process's memory: tiers over disks, servers and buckets."""

from __future__ import annotations

from asynckv.stores.below import FlushResult
from asynckv.stores.client import TierStatistics
from asynckv.stores.tiered import (
    PrefixMatch,
    TieredStatistics,
    TieredStore,
    open_tier,
)

__all__ = (
    "FlushResult",
    "PrefixMatch",
    "TierStatistics",
    "TieredStatistics",
    "TieredStore",
    "open_tier",
)
