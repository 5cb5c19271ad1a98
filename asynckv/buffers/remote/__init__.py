"""A peer's buffers: calls that go to the other end of a link."""

from __future__ import annotations

from asynckv.buffers.remote.peer import Peer, connect

__all__ = ("Peer", "connect")
