"""Entries that are told apart, and where each of them is."""

from __future__ import annotations

import itertools
from typing import Final

import torch

from asynckv.abc import KVEntry, KVLookupBuffer
from asynckv.testing.blocked import until
from asynckv.testing.expectations import expect, expect_same, noise
from harness.cancellations.grounds import Ground

__all__ = (
    "HUGE",
    "LARGE",
    "OVERWRITE",
    "SMALL",
    "TOKENS",
    "Entries",
    "expect_overwritten",
)

SMALL: Final = 512
"""Rides in a frame."""
LARGE: Final = 72 * 1024
"""Goes over the lanes, and is copied in a thread."""
HUGE: Final = 5 * 2**20
"""Is copied, and moved over a lane, in more than one chunk."""
OVERWRITE: Final = 9

TOKENS: Final = [1]
_numbers: Final = itertools.count()


def expect_overwritten(tensor: torch.Tensor) -> None:
    """:raises AssertionError: it shows anything but what its owner wrote into it"""
    expect(bool((tensor == OVERWRITE).all()), "the caller's tensor was written to")


class Entries:
    """One entry at a time, of ``nbytes``, by a name of its own.

    Nothing is ever lost: what was inserted and not acknowledged can be selected.
    """

    def __init__(self, ground: Ground, nbytes: int) -> None:
        self.nbytes = nbytes
        self._local = ground.local
        self._ledger = ground.local.ledger
        self._number = 0
        self._acknowledged = 0
        self.key = torch.zeros(nbytes, dtype=torch.uint8)
        self.into = torch.zeros(nbytes, dtype=torch.uint8)

    @property
    def name(self) -> str:
        """The id of the entry of this round."""
        return f"entry {self._number}"

    @property
    def contents(self) -> torch.Tensor:
        """Its bytes."""
        return noise(self.nbytes, self._number % (50 if self.nbytes <= LARGE else 2))

    def begin(self) -> None:
        """Begin a round, with an entry that was not there before."""
        self._number = next(_numbers)
        self.key.copy_(self.contents)
        self.into.zero_()
        self._acknowledged = self._local.statistics().acknowledged

    async def insert(self, side: KVLookupBuffer) -> None:
        """Insert it; the caller's tensor is overwritten as soon as that has ended."""
        try:
            await side.insert(TOKENS, None, self.key, None, None, entry_id=self.name)
        finally:
            self.key.fill_(OVERWRITE)

    async def insert_again(self, side: KVLookupBuffer) -> None:
        """Insert it from other memory: succeeds also if it is in."""
        key = self.contents
        await side.insert(TOKENS, None, key, None, None, entry_id=self.name)

    async def bring(self) -> None:
        """Begin a round with the entry in the buffer."""
        self.begin()
        await self.insert_again(self._local)

    async def take(self, side: KVLookupBuffer) -> KVEntry:
        """Take it into a tensor of the caller's, overwritten when that has ended."""
        try:
            entry = await side.drop_select(TOKENS, into={"key": self.into})
            self.expect_is(entry)
            return entry
        finally:
            self.into.fill_(OVERWRITE)

    def expect_is(self, entry: KVEntry) -> None:
        """:raises AssertionError: it is another one, or its bytes are not its own"""
        expect(entry.entry_id == self.name, f"{entry.entry_id} is not {self.name}")
        tensors = [x for x in (entry.key, entry.value) if isinstance(x, torch.Tensor)]
        expect(tensors != [], "no tensor")
        for tensor in tensors:
            expect_same(tensor, self.contents)

    async def settled(self, side: KVLookupBuffer) -> None:
        """Wait until all that ``side`` has asked for is decided."""
        await side.peek(TOKENS)  # a round trip: what was sent before has arrived
        entries = self._ledger.table.entries
        await until(lambda: all(e.complete and not e.leases for e in entries.values()))

    @property
    def is_in(self) -> bool:
        """Whether it can be selected."""
        found = self._ledger.table.entries.values()
        return any(entry.entry_id == self.name for entry in found)

    def expect_in(self, is_so: bool) -> None:
        """In the buffer and never acknowledged, or the other way round.

        :raises AssertionError: it was lost, or is there twice
        """
        taken = self._local.statistics().acknowledged - self._acknowledged
        count = self._local.statistics().entries
        where = f"{count} entries, {taken} acknowledged"
        expect((count, taken) == ((1, 0) if is_so else (0, 1)), where)
        expect(self.is_in is is_so, f"another entry is there: {where}")

    async def clear(self, side: KVLookupBuffer) -> None:
        """Take what is there, whole and once."""
        if self.is_in:
            self.expect_is(await side.drop_select(TOKENS))
