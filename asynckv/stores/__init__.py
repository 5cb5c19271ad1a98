"""Stores that outgrow a process's memory: tiers over disks, servers and buckets."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
