"""Pure arithmetic over ranks: no torch, no I/O."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
