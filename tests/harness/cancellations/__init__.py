"""Every public coroutine, cancelled at every moment, with what must hold after it."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
