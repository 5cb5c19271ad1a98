"""How much an NCCL transport may have on its way, and how long it may take."""

from __future__ import annotations

import dataclasses

__all__ = ("NcclSettings",)


@dataclasses.dataclass(frozen=True, slots=True)
class NcclSettings:
    """Of one transport: each side's own, but for the smaller ``chunk_bytes`` of both.

    An operation moves at most ``chunk_bytes``; at most ``max_operations`` of them, of
    ``max_bytes``, are granted at a time, and ``max_bytes`` offered. It may take
    ``patience_s``, and more if it were slower than ``least_bytes_per_s``.
    """

    chunk_bytes: int = 4 * 2**20
    max_operations: int = 4
    max_bytes: int = 64 * 2**20
    open_s: float = 30.0
    patience_s: float = 10.0
    least_bytes_per_s: float = 50e6

    def timeout_s(self, nbytes: int) -> float:
        """How long an operation of ``nbytes`` may take, once it is granted."""
        return self.patience_s + nbytes / self.least_bytes_per_s
