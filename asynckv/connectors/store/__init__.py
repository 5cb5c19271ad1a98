"""KV of prompts in a store that engines share, chunk by chunk."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
