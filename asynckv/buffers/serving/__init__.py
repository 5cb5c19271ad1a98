"""What a buffer answers its peers."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
