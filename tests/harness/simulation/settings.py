"""What differs from seed to seed besides the network and its faults."""

from __future__ import annotations

import dataclasses
import random

__all__ = ("Settings",)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes, bounds and numbers of one run."""

    max_bytes: int
    """Of the buffer: small enough that inserts wait for room."""
    receive_bytes: int
    max_deliver: int
    max_hold_s: float | None
    clients: int
    applications: int
    """As many at a time on each client."""
    local_applications: int
    """And as many beside the buffer itself."""
    lanes: int
    think_s: float
    faults: int
    min_events: int

    @classmethod
    def draw(cls, chance: random.Random, min_events: int, *, is_fast: bool) -> Settings:
        """Draw them; a slow network needs more time to carry an entry."""
        return cls(
            max_bytes=chance.choice((300_000, 500_000, 3_000_000)),
            receive_bytes=chance.choice((250_000, 2_000_000)),
            max_deliver=chance.choice((2, 5)),
            max_hold_s=chance.choice((None, None, 4.0 if is_fast else 40.0)),
            clients=chance.randint(2, 4),
            applications=chance.randint(2, 4),
            local_applications=chance.randint(0, 2),
            lanes=chance.randint(1, 3),
            think_s=chance.choice((0.1, 0.4)),
            faults=chance.choice((0, 4, 10, 20)),
            min_events=min_events,
        )

    def __str__(self) -> str:
        fields = dataclasses.asdict(self).items()
        return ", ".join(f"{name}={value}" for name, value in fields)
