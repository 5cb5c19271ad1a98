"""Entries of a lookup buffer: pure state, and how they come in."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
