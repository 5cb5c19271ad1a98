"""What a peer puts from memory of a GPU that the buffers' side reads."""

from __future__ import annotations

import dataclasses

from asynckv.buffers.remote.peer import Peer
from asynckv.sharing.exporter import Importer
from asynckv.tensors.paged_arena import PagedArena

__all__ = ("SharedPuts",)


@dataclasses.dataclass(frozen=True)
class SharedPuts:
    """What ``peer`` shows on its link."""

    peer: Peer

    @property
    def importer(self) -> Importer:
        """Who reads it."""
        importer = self.peer._imports.importer(self.peer._linked())
        if importer is None:
            raise LookupError("nobody reads what is put")
        return importer

    @property
    def are_read(self) -> bool:
        """Does anybody read it?"""
        try:
            return self.importer.is_connected
        except LookupError:
            return False

    @property
    def has_shown(self) -> bool:
        """Was anything shown to be read, on this link?"""
        return self.importer._last_number > 0

    @property
    def staged_bytes(self) -> int:
        """What the peer has of its GPU for what it puts."""
        arena = (self.peer.on_gpu or self.peer.memory).arena
        if isinstance(arena, PagedArena):
            arena.collect()
        return arena.used_bytes + arena.pinned_bytes
