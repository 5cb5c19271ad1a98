"""Who may connect, and how both sides prove who they are."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
