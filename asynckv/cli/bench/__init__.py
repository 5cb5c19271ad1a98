"""``asynckv bench``: measures your own machines, each figure beside a baseline."""

from __future__ import annotations

__all__ = ()
