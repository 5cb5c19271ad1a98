"""One call of a simulated application: made, recorded, and looked at.

Each byte that is handed out is compared, and memory that is its owner's again
is overwritten at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from typing import Any, Final

import torch

from asynckv import KVEntry, KVLookupBuffer, PeerLost, SelectStream
from asynckv.tensors.views import bytes_of
from harness.simulation.contents import (
    Contents,
    Wanted,
    by_field,
    scribble,
    wrong_bytes,
)
from harness.simulation.history import Call, History
from harness.simulation.nodes import Process

__all__ = ("ApplicationError", "Calls")

_FAILS: Final = 0.15
_KEPT: Final = 4
_LONG_SHARE: Final = 0.01
_LONG_S: Final = 10.0


class ApplicationError(Exception):
    """The application fails with an entry in its hands."""


class Calls:
    """The calls that one task makes of one buffer."""

    def __init__(
        self,
        process: Process,
        lookup: KVLookupBuffer,
        history: History,
        chance: random.Random,
    ) -> None:
        self.is_lost = False
        """The peer is gone for good: there is nothing more to call."""
        self._process = process
        self._lookup = lookup
        self._history = history
        self._chance = chance
        # Memory that must not change any more, and what it must hold.
        self._kept: list[tuple[Call, KVEntry]] = []
        self._quiet: list[tuple[Call, torch.Tensor]] = []

    async def insert(self, call: Call, contents: Contents) -> None:
        """Insert an entry; its memory is overwritten as soon as that may be."""
        tensors = contents.tensors()
        try:
            with self._recorded(call):
                entry_id = await self._lookup.insert(
                    list(contents.tokens),
                    contents.roi,
                    **by_field(tensors),
                    entry_id=contents.entry_id or None,
                    ttl_s=contents.ttl_s,
                    deliveries=contents.deliveries,
                )
                self._history.end(call, "ok", entry_id)
        finally:
            scribble(tensors)

    async def write(self, call: Call, contents: Contents) -> None:
        """Insert an entry tensor by tensor; sometimes fail in the middle."""
        tensors = contents.tensors()
        names = self._chance.sample(list(tensors), len(tensors))
        fails = self._chance.random() < _FAILS
        with self._recorded(call):
            async with self._lookup.open_insert(
                list(contents.tokens),
                contents.roi,
                contents.specs,
                entry_id=contents.entry_id,
                ttl_s=contents.ttl_s,
                deliveries=contents.deliveries,
            ) as writer:
                for name in names:
                    await asyncio.sleep(self._draw_pause_s())
                    if fails and name == names[-1]:
                        raise ApplicationError
                    try:
                        await writer.put(name, tensors[name])
                    finally:
                        scribble({name: tensors[name]})
            self._history.end(call, "ok")

    async def take(
        self, call: Call, wanted: Wanted, into: dict[str, torch.Tensor]
    ) -> None:
        """Await an entry; ``into`` is overwritten if it does not come."""
        try:
            await self._take(call, wanted, into)
        finally:
            if call.outcome != "ok":
                scribble(into)
                self._quiet += [(call, tensor) for tensor in into.values()]

    async def _take(
        self, call: Call, wanted: Wanted, into: dict[str, torch.Tensor]
    ) -> None:
        with self._recorded(call):
            select = self._lookup.drop_select(**_arguments(wanted), into=into or None)
            entry = await select
            self._check(call, entry)
            self._history.use(call)
            self._history.end(call, "ok")
            self._kept.append((call, entry))

    async def borrow(self, call: Call, wanted: Wanted) -> None:
        """Enter a drop_select; sometimes fail with the entry in hand."""
        fails = self._chance.random() < _FAILS
        with self._recorded(call):
            async with self._lookup.drop_select(**_arguments(wanted)) as entry:
                with self._holding(call):
                    self._check(call, entry)
                    await asyncio.sleep(self._draw_pause_s())
                    self._check_bytes(call, entry)
                    if fails:
                        raise ApplicationError
                    self._history.use(call)
            self._history.end(call, "ok")

    async def read(self, call: Call, wanted: Wanted) -> None:
        """Read an entry as it comes; sometimes leave early, sometimes fail."""
        fails = self._chance.random() < _FAILS
        leaves_early = self._chance.random() < _FAILS
        with self._recorded(call):
            async with self._lookup.open_drop_select(**_arguments(wanted)) as stream:
                with self._holding(call):
                    await self._read(call, stream, leaves_early)
                    if fails:
                        raise ApplicationError
                    self._history.use(call)
            self._history.end(call, "ok")

    async def _read(self, call: Call, stream: SelectStream, leaves_early: bool) -> None:
        number = await stream.wait_for("extras.number")
        contents = self._history.library.find(number)
        if contents is None:
            self._history.blame(call, "a stream without a right number")
            return
        self._has(call, contents, stream.attempt, stream.matched_tokens)
        seen = dict[str, None]()
        async for name, tensor in stream:
            if wrong := wrong_bytes(contents, name, tensor):
                self._history.blame(call, wrong)
            seen[name] = None
            await asyncio.sleep(self._draw_pause_s())
            if leaves_early:
                return
        if set(seen) != set(contents.specs):
            self._history.blame(call, "a stream ended before its end")

    async def peek(self, call: Call, wanted: Wanted) -> None:
        """Ask for the longest match."""
        with self._recorded(call):
            matched = await self._lookup.peek(wanted.tokens)
            if not 0 <= matched <= len(wanted.tokens or ()):
                self._history.blame(call, f"{matched} tokens match")
            self._history.end(call, "ok", f"{matched}")

    async def taken(self, call: Call, contents: Contents) -> None:
        """Wait for the end of an entry."""
        with self._recorded(call):
            await self._lookup.taken(contents.entry_id)
            self._history.end(call, "ok")

    async def withdraw(self, call: Call, contents: Contents) -> None:
        """Take an entry back."""
        with self._recorded(call):
            gone = await self._lookup.withdraw(contents.entry_id)
            self._history.end(call, "ok", f"{gone}")

    @contextlib.contextmanager
    def _recorded(self, call: Call) -> Iterator[None]:
        """Record how the call ends, if it does not end well."""
        call.has_begun = True
        try:
            yield
        except asyncio.CancelledError:
            self._history.end(call, "cancelled")
            raise
        except PeerLost as exc:
            self._history.end(call, "PeerLost", str(exc)[:80])
            self.is_lost = True
        except Exception as exc:  # noqa: BLE001 - the checker knows what may be
            self._history.end(call, type(exc).__name__, str(exc)[:80])

    @contextlib.contextmanager
    def _holding(self, call: Call) -> Iterator[None]:
        """The application's body: what it has is nobody else's meanwhile."""
        try:
            yield
        finally:
            self._history.release(call)

    def _check(self, call: Call, entry: KVEntry) -> None:
        contents, wrong = self._history.library.wrong_entry(entry)
        if wrong:
            self._history.blame(call, f"the entry {wrong}")
        if contents is not None:
            self._has(call, contents, entry.attempt, entry.matched_tokens)

    def _has(self, call: Call, contents: Contents, attempt: int, matched: int) -> None:
        self._history.receive(call, contents, attempt)
        expected = call.wanted.matched(contents) if call.wanted is not None else None
        if expected is None:
            self._history.blame(call, f"got {list(contents.key)}, which does not match")
        elif matched != expected:
            self._history.blame(call, f"{matched} tokens match, not {expected}")

    def _check_bytes(self, call: Call, entry: KVEntry) -> None:
        _, wrong = self._history.library.wrong_entry(entry)
        if wrong:
            self._history.blame(call, f"while it was held the entry {wrong}")

    def look_at_memory(self) -> None:
        """What was handed over or given back to its owner stays as it is."""
        for call, entry in self._kept:
            _, wrong = self._history.library.wrong_entry(entry)
            if wrong:
                self._history.blame(call, f"later the entry {wrong}")
        for call, tensor in self._quiet:
            if bytes(bytes_of(tensor)).strip(b"\xa5"):
                self._history.blame(call, "memory was written to after the call")
        del self._kept[:-_KEPT], self._quiet[:-_KEPT]

    def _draw_pause_s(self) -> float:
        if self._chance.random() < _LONG_SHARE:
            return _LONG_S * self._chance.random()
        return self._chance.choice((0.0, 0.0001, 0.01, 0.3)) * self._chance.random()


def _arguments(wanted: Wanted) -> dict[str, Any]:
    return {
        "input_tokens": None if wanted.tokens is None else list(wanted.tokens),
        "entry_id": wanted.entry_id,
        "match": wanted.match,
        "min_matched_tokens": wanted.min_matched_tokens,
    }
