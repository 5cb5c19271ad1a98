"""What a connector has to know of the engine that calls it."""

from __future__ import annotations

import msgspec

__all__ = ("KVEngine",)


class KVEngine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, as one of its processes sees it.

    ``engine_id`` is what its peers call it. ``block_size`` is tokens a block.
    ``rank`` is this worker's; a scheduler side is of no rank and leaves it.

    :raises ValueError: there is no such rank, or no token in a block
    """

    engine_id: str
    block_size: int
    rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size}")
        if not 0 <= self.rank < self.tp_size:
            raise ValueError(f"rank {self.rank} of tp_size={self.tp_size}")

    def blocks_of(self, num_tokens: int) -> int:
        """Return how many blocks so many tokens take."""
        return -(-num_tokens // self.block_size)
