"""What can be observed."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
