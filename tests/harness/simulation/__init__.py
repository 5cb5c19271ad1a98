"""Real asynckv code on virtual machines: one seed, one story, again and again."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
