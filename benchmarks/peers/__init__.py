"""The same work done by others that a user may pick, beside asynckv in one run."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
