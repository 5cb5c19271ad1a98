"""Pure arithmetic over ranks."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
