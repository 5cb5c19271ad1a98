"""For whom: engines and frameworks, one file each."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
