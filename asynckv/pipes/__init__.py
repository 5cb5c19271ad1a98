"""Ordered streams of tensors between two ranks."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
