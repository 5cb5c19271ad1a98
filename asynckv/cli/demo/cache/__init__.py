"""``asynckv demo cache``: two engines, one store, and its disk after a kill."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
