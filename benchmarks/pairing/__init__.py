"""What benchmarks share: paired runs with their A/A, limits, and a serving process."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
