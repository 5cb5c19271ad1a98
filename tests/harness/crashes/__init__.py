"""Real processes that die by SIGKILL in the middle of their work."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
