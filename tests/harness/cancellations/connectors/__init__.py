"""What an engine calls, cancelled wherever it waits: every connector, both sides."""

from __future__ import annotations

__all__: tuple[str, ...] = ()
