"""Fakes, connected pairs and checks for your own tests."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
