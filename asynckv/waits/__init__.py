"""Waiting, written once: in line, for what is given first come, first served."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
