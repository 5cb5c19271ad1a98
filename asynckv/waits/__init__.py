"""Waiting, written once: in line, for a reply or a change, and for tasks to end."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
