"""What a worker says of its transfers after a step, and what all of them say."""

from __future__ import annotations

import dataclasses
from typing import Final, Protocol, Self

__all__ = ("Foldable", "HasKVOutput", "KVConnectorOutput")

_ENDS: Final = (
    "finished_sending",
    "failed_sending",
    "full_sending",
    "finished_recving",
    "failed_recving",
)


class Foldable(Protocol):
    """Statistics, or whatever else of several workers can be made one of."""

    def aggregate(self, other: Self, /) -> Self:
        """Return both as one."""
        ...


@dataclasses.dataclass(slots=True)
class KVConnectorOutput:
    """Transfers that ended, by request id. The names are vLLM's.

    A failed receive is in ``failed_recving`` and in ``finished_recving``, a failed send
    in ``failed_sending`` and in ``finished_sending``, and in ``full_sending`` too if
    there was no room for it; ``reasons`` says why.
    ``expected_finished_count``, if above 0, is how many workers are to report
    requests that nobody has reported yet. ``parts``, where a connector is made of
    several, says what is whose: the rest is all of them together.
    """

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    failed_recving: set[str] | None = None
    invalid_block_ids: set[int] = dataclasses.field(default_factory=set)
    kv_connector_stats: Foldable | None = None
    kv_connector_worker_meta: Foldable | None = None
    expected_finished_count: int = 0
    failed_sending: set[str] | None = None
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    parts: tuple[KVConnectorOutput, ...] = ()
    full_sending: set[str] | None = None

    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not (
            self.finished_sending
            or self.finished_recving
            or self.failed_recving
            or self.invalid_block_ids
            or self.kv_connector_stats
            or self.kv_connector_worker_meta
        )

    def add_ends(self, other: KVConnectorOutput) -> None:
        """Take in what ended by ``other`` too, part by part."""
        self.add_whole(other)
        parts = [
            *self.parts,
            *(KVConnectorOutput() for _ in other.parts[len(self.parts) :]),
        ]
        for mine, theirs in zip(parts, other.parts, strict=False):
            mine.add_ends(theirs)
        self.parts = tuple(parts)

    def add_whole(self, other: KVConnectorOutput) -> None:
        """The same, but for whose it is."""
        for field in _ENDS:
            if theirs := getattr(other, field):
                setattr(self, field, (getattr(self, field) or set()) | theirs)
        self.invalid_block_ids |= other.invalid_block_ids
        self.reasons |= other.reasons


class HasKVOutput(Protocol):
    """One worker's whole output of a step: its transfers are one attribute of it."""

    kv_connector_output: KVConnectorOutput | None
