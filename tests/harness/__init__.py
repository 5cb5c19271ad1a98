"""What asynckv is tested with, and nobody else needs: no part of the wheel."""

from __future__ import annotations

__all__ = ()
