"""One multiplexed connection to one peer."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
