"""GPU memory behind the words of host memory: names, copies, an arena, marks."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
