"""``asynckv demo``: two processes, one real model, five acts, the same tokens."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
