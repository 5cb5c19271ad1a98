"""Entries that are told apart, where each of them is, and who acts beside a call."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, Final

import torch

from asynckv.abc import KVEntry, KVLookupBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.testing.blocked import until
from asynckv.testing.expectations import expect, expect_same, noise
from asynckv.types import TensorSpec
from harness.cancellations.grounds import BUFFER_BYTES, Ground
from harness.cancellations.sweeper import LARGE, Sweeper

__all__ = (
    "OVERWRITE",
    "TOKENS",
    "Entries",
    "Filler",
    "Partner",
    "expect_overwritten",
    "zeros",
)

OVERWRITE: Final = 9
TOKENS: Final = [1]
_numbers: Final = itertools.count()
_SPECS: Final = {"key": TensorSpec((BUFFER_BYTES - 64,), "uint8")}


def zeros(nbytes: int) -> torch.Tensor:
    """Return memory of the caller's."""
    return torch.zeros(nbytes, dtype=torch.uint8)


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
        self._number = 0
        self._acknowledged = 0
        self.key, self.into = zeros(nbytes), zeros(nbytes)

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

    async def take_new(self, side: KVLookupBuffer) -> KVEntry:
        """Take it."""
        entry = await side.drop_select(TOKENS)
        self.expect_is(entry)
        return entry

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
        entries = self._local.ledger.table.entries
        await until(lambda: all(e.complete and not e.leases for e in entries.values()))

    @property
    def is_in(self) -> bool:
        """Whether it can be selected."""
        found = self._local.ledger.table.entries.values()
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

    async def clear(self, ground: Ground) -> None:
        """Take what is there, whole and once; then nothing is under way."""
        if self.is_in:
            self.expect_is(await ground.consumer.drop_select(TOKENS))
        await ground.check_quiet()


class Partner:
    """Does something once the call has come so far, or is over.

    >>> partner = Partner(sweeper, lambda: statistics().waiting_selects == 1, insert)
    """

    def __init__(
        self,
        sweeper: Sweeper,
        has_come: Callable[[], bool],
        act: Callable[..., Awaitable[object]],
        *args: Any,
    ) -> None:
        self.is_over = False
        self.task: asyncio.Task[Any] = asyncio.create_task(
            self._run(sweeper, has_come, act, args)
        )

    async def ended(self) -> Any:
        """The call is over: wait until this partner has done its part."""
        self.is_over = True
        return await self.task

    async def _run(
        self,
        sweeper: Sweeper,
        has_come: Callable[[], bool],
        act: Callable[..., Awaitable[object]],
        args: tuple[Any, ...],
    ) -> object:
        await until(lambda: self.is_over or has_come())
        await sweeper.pause()
        return await act(*args)


class Filler:
    """Takes all the room of a buffer, and gives it back, without moving a byte."""

    def __init__(self, local: LookupBuffer) -> None:
        self._local = local
        self._freed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def fill(self, entry_id: str | None = None) -> None:
        """Take the room, by an entry of that id."""
        self._freed.clear()
        self._task = asyncio.create_task(self._hold(entry_id))
        await until(lambda: self._local.statistics().used_bytes >= BUFFER_BYTES - 64)

    async def fill_for(
        self, sweeper: Sweeper, act: Callable[..., Awaitable[object]], *args: Any
    ) -> Partner:
        """Take the room; return the partner that acts once an insert waits for it."""
        await self.fill()
        local = self._local
        return Partner(
            sweeper, lambda: local.statistics().waiting_inserts > 0, act, *args
        )

    async def free(self) -> None:
        """Give it back. May be called again."""
        self._freed.set()
        if self._task is not None:
            await self._task

    async def _hold(self, entry_id: str | None) -> None:
        opened = self._local.open_insert([2], None, _SPECS, entry_id=entry_id)
        try:
            async with opened:
                await self._freed.wait()
                raise _Freed
        except _Freed:
            pass


class _Freed(Exception):
    pass
