"""Producers and consumers who do not give up, and an account of what they saw."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable
from typing import Final

import torch

from asynckv.abc import KVEntry, KVLookupBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import connect
from asynckv.errors import AsyncKVError, EntryConflict
from asynckv.testing.blocked import until

__all__ = ("Traffic",)

_NUMELS: Final = (4, 1_000, 20_000, 100_000)
_CALL_S: Final = 20.0
_DRAINED_S: Final = 60.0
_PAUSE_S: Final = 0.005


class Traffic:
    """Entries on their way through ``lookup``, which is served at ``url``.

    What an entry holds follows from its number, so every byte can be checked.
    Whoever fails by an error of asynckv tries again over another connection; any
    other error, or a call that takes longer than 20 s, ends the whole.

    ``seen`` counts how often an entry was handed out, ``committed`` how often it
    was acknowledged; ``wrong`` tells what should never be.
    """

    def __init__(
        self, lookup: LookupBuffer, url: str, *, reconnect_s: float = 5.0
    ) -> None:
        self.seen: collections.Counter[int] = collections.Counter()
        self.committed: collections.Counter[int] = collections.Counter()
        self.errors: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self._lookup = lookup
        self._url = url
        self._reconnect_s = reconnect_s

    async def run(self, count: int, *, producers: int = 2, consumers: int = 2) -> None:
        """Insert ``count`` entries, and return when all of them are gone."""
        todo = list(range(count))
        async with asyncio.TaskGroup() as group:
            using = [
                group.create_task(self._persist(self._use)) for _ in range(consumers)
            ]
            async with asyncio.TaskGroup() as inserting:
                for _ in range(producers):
                    inserting.create_task(self._insert_all(todo))
            await until(self._is_empty, timeout_s=_DRAINED_S)
            for task in using:
                task.cancel()

    def _is_empty(self) -> bool:
        return not self._lookup.statistics().entries

    async def _insert_all(self, todo: list[int]) -> None:
        while todo:
            number = todo.pop()

            async def insert(lookup: KVLookupBuffer, number: int = number) -> bool:
                await self._insert(lookup, number)
                return False

            await self._persist(insert)

    async def _persist(self, step: Callable[[KVLookupBuffer], Awaitable[bool]]) -> None:
        """Repeat ``step`` while it says so, over as many connections as it takes."""
        goes_on = True
        while goes_on:
            try:
                async with connect(self._url, reconnect_s=self._reconnect_s) as peer:
                    while goes_on:
                        async with asyncio.timeout(_CALL_S):
                            goes_on = await step(peer.lookup)
            except AsyncKVError as exc:
                self.errors[type(exc).__name__] += 1
                await asyncio.sleep(_PAUSE_S)

    async def _insert(self, lookup: KVLookupBuffer, number: int) -> None:
        try:
            await lookup.insert(
                _tokens_of(number),
                None,
                _key_of(number),
                None,
                None,
                entry_id=str(number),
            )
        except EntryConflict as exc:
            self.wrong.append(f"insert of {number}: {exc}")

    async def _use(self, lookup: KVLookupBuffer) -> bool:
        async with lookup.drop_select() as entry:
            number = int(entry.entry_id)
            self._check(number, entry)
            self.seen[number] += 1
        self.committed[number] += 1
        if self.committed[number] > 1:
            self.wrong.append(f"{number} was committed twice")
        return True

    def _check(self, number: int, entry: KVEntry) -> None:
        is_right = (
            isinstance(entry.input_tokens, torch.Tensor)
            and isinstance(entry.key, torch.Tensor)
            and entry.input_tokens.tolist() == _tokens_of(number)
            and torch.equal(entry.key, _key_of(number))
        )
        if not is_right:
            self.wrong.append(f"{number} holds other bytes than were inserted")


def _tokens_of(number: int) -> list[int]:
    return [number, 7, number * 31]


def _key_of(number: int) -> torch.Tensor:
    numel = _NUMELS[number % len(_NUMELS)]
    return torch.arange(numel, dtype=torch.int32) * 2654435761 % 1000003 + number
