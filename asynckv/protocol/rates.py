"""How often something may happen: so often at once, and so often a second. No clock.

Against floods that cost the peer less than us, such as requests that are
cancelled as soon as they are made (in HTTP/2: CVE-2023-44487).
"""

from __future__ import annotations

__all__ = ("Rate",)


class Rate:
    """A budget of ``at_once`` events, to which ``per_s`` are added every second."""

    def __init__(self, per_s: int, at_once: int, now_s: float) -> None:
        self._per_s = per_s
        self._at_once = max(at_once, per_s)
        self._left = float(self._at_once)
        self._then_s = now_s

    def spend(self, count: int, now_s: float) -> bool:
        """Count what has happened; ``False`` if that was too often."""
        earned = max(now_s - self._then_s, 0.0) * self._per_s
        self._left = min(self._left + earned, self._at_once) - count
        self._then_s = now_s
        return self._left >= 0
