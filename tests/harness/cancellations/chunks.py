"""Entries of several chunks: stopped in the middle, and memory quiet at once."""

from __future__ import annotations

from typing import Final

from harness.cancellations.entries import HUGE
from harness.cancellations.grounds import Ground, open_ground
from harness.cancellations.inserting import an_insert
from harness.cancellations.scenario import Scenario
from harness.cancellations.selecting import a_select
from harness.cancellations.sweeper import Sweeper

__all__ = ("CHUNKS", "a_huge_entry")


async def a_huge_entry(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Inserted, and selected into memory of the caller, where there is room for it."""
    opened = open_ground(ground.kind, max_bytes=2 * nbytes, **ground.options)
    async with opened as wide:
        await an_insert(wide, sweeper, nbytes)
        await a_select(wide, sweeper, nbytes)


CHUNKS: Final = (
    Scenario(
        a_huge_entry,
        ("KVLookupBuffer.insert", "KVLookupBuffer.drop_select"),
        ("local", "mem", "tcp"),
        (HUGE,),
        is_costly=True,
    ),
)
