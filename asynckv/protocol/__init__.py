"""What two peers say to each other. Does no I/O."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
