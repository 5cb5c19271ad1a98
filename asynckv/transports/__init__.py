"""Who moves the payload bytes of a link."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
