"""An event loop in a thread of its own, for engines that never await."""

from __future__ import annotations

from asynckv.integrations.bridge.bridge import Bridge

__all__ = ("Bridge",)
