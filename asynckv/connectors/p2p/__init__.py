"""KV from one engine to another, rank by rank: pulled or pushed."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
