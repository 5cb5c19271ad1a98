"""What benchmarks share: paired runs with limits, other processes, sides of a tier."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
