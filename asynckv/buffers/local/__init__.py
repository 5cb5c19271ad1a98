"""What callers of this process do with a lookup buffer."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
