"""Values on a local disk, in slots that are there before they are used."""

from __future__ import annotations

from asynckv.stores.disk.tier import DiskStatistics, DiskTier
from asynckv.stores.disk.url import parse_disk_url

__all__ = ("DiskStatistics", "DiskTier", "parse_disk_url")
