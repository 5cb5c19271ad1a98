"""The asynckv command, one file a sub-command."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
