"""What a store buffer holds."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
