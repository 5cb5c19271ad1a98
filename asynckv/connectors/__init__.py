"""What an engine calls: KV to a peer, to a store, or to several of these."""

from __future__ import annotations

__all__ = ()
