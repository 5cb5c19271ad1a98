"""Where KV waits for its consumer."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
