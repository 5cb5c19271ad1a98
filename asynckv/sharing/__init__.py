"""Memory that another process of this host reads where it lies."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
