"""KV of prompts in a store that engines share, block by block."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
