"""A toy engine with paged caches and ranks: for tests of connectors."""

from __future__ import annotations

__all__ = ()
