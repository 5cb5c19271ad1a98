"""Tensors as bytes, and the memory they wait in."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
