"""``asynckv serve``: buffers in a process of their own, for any number of engines."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
