"""Calls of a store that are cancelled at random moments, by several at once.

A value is one number throughout, and no number is put twice: so what is found says
which put it is of, and if it is whole. Memory that was lent to a call is overwritten in
the turn in which its cancellation comes out of it.
"""

from __future__ import annotations

import asyncio
import collections
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import torch

from asynckv.abc import KVStoreBuffer
from asynckv.testing.expectations import expect

__all__ = ("KEYS", "Versions", "cancel_at_random")

_COUNTS: Final = (*(64, 5_000, 20_000) * 4, 132_000)
"""Of int64: what is copied at once, in a thread, and piece by piece."""
_WORKERS: Final = 6
_KEYS_EACH: Final = 2 * len(_COUNTS)
_COUNT_OF: Final[Mapping[str, int]] = {
    f"{worker}/{number}": _COUNTS[number % len(_COUNTS)]
    for worker in range(_WORKERS)
    for number in range(_KEYS_EACH)
}
KEYS: Final = tuple(_COUNT_OF)
"""All that is put: 22 MB at a time."""

_OVERWRITTEN: Final = -1
_EMPTY: Final = -2
_GONE: Final = 0
_PATIENCE_S: Final = 30.0
_TIMER_S: Final = 0.002
_WATCHED: Final = 16
_LEFT_ALONE: Final = 0.1
_CANCELLED: Final = ("put", "put_many", "get", "get_into", "get_many")
"""What counts: puts and gets."""


class Versions:
    """What may be found under each key."""

    def __init__(self) -> None:
        self.found: collections.Counter[bool] = collections.Counter()
        self._last = _GONE
        self._ever: dict[str, set[int]] = {key: {_GONE} for key in KEYS}
        self._may_be: dict[str, set[int]] = {key: {_GONE} for key in KEYS}

    async def put(self, store: KVStoreBuffer, key: str) -> None:
        """Put the next value of a key, and nobody cancels that."""
        version = self.begin(key)
        await store.put(key, _full(key, version))
        self.end(key, version)

    def begin(self, key: str) -> int:
        """A put begins: return its number, which may be found from now on."""
        self._last += 1
        self._ever[key].add(self._last)
        self._may_be[key].add(self._last)
        return self._last

    def begin_delete(self, key: str) -> None:
        """What was there may be gone."""
        self._may_be[key].add(_GONE)

    def end(self, key: str, version: int = _GONE) -> None:
        """A change was made: nothing of before may be found."""
        self._may_be[key] = {version}

    def check(self, key: str, found: torch.Tensor | None) -> None:
        """What its only writer has found, who makes no change meanwhile.

        :raises AssertionError: it is torn, or was not put last
        """
        version = self._version_of(key, found)
        expect(
            version in (_GONE, *self._may_be[key]),
            f"{key} has {version}, not of {self._may_be[key]}",
        )
        if version != _GONE:  # what is not found may come back from a tier
            self.end(key, version)

    def check_any(self, key: str, found: torch.Tensor | None) -> None:
        """What was found while there may be changes.

        :raises AssertionError: it is torn, or was never put there
        """
        version = self._version_of(key, found)
        expect(version in self._ever[key], f"{key} has {version}, never put there")

    def _version_of(self, key: str, found: torch.Tensor | None) -> int:
        self.found[found is not None] += 1
        if found is None:
            return _GONE
        expect(len(found) == _COUNT_OF[key], f"{key} has {len(found)} numbers")
        version = int(found[0])
        if not _is_all(found, version):
            raise AssertionError(f"{key} is torn: {set(found.tolist())}")
        return version


async def cancel_at_random(
    store: KVStoreBuffer, versions: Versions, cancellations: int, seed: int
) -> collections.Counter[str]:
    """Put and get until so many such calls were cancelled under way; count all.

    :raises AssertionError: a value is torn, or is not of the put that it should be of;
        or memory was written to after its call was cancelled
    :raises TimeoutError: a cancelled call does not end
    """
    cancelled: collections.Counter[str] = collections.Counter()
    workers = [
        _Worker(number, store, versions, random.Random(f"{seed} {number}"), cancelled)
        for number in range(_WORKERS)
    ]
    try:
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker.run(cancellations))
    except BaseExceptionGroup as group_error:
        error = group_error.exceptions[0]
        error.add_note(f"cancelled at random with seed {seed}: {dict(cancelled)}")
        raise error from None
    return cancelled


class _Worker:
    """Writes keys of its own, and reads any."""

    def __init__(
        self,
        number: int,
        store: KVStoreBuffer,
        versions: Versions,
        rng: random.Random,
        cancelled: collections.Counter[str],
    ) -> None:
        self._store, self._versions, self._rng = store, versions, rng
        self._cancelled = cancelled
        self._own = [key for key in KEYS if key.startswith(f"{number}/")]
        # The same memory for each put of a key: a late reader sees another one's value.
        self._sources = {key: _full(key, _OVERWRITTEN) for key in self._own}
        self._quiet: collections.deque[torch.Tensor] = collections.deque()
        self._calls: dict[str, Callable[[], Awaitable[None]]] = {
            "put": lambda: self._put(self._some(1)),
            "put_many": lambda: self._put(self._some(4)),
            "get": self._get,
            "get_into": lambda: self._get_into(self._some(1)),
            "get_many": lambda: self._get_into(self._some(4)),
            "pin": self._pin,
            "delete": self._delete,
        }
        self._usual_s = dict.fromkeys(self._calls, 0.001)

    async def run(self, cancellations: int) -> None:
        """Make calls, until there were so many by all together."""
        names = [*_CANCELLED, *_CANCELLED[2:], *self._calls]
        while sum(self._cancelled[name] for name in _CANCELLED) < cancellations:
            await self._call(self._rng.choice(names))
            self._check_quiet(_WATCHED)
        self._check_quiet(0)

    async def _call(self, name: str) -> None:
        """Make a call, and cancel it in the time that such calls take."""
        is_left_alone = self._rng.random() < _LEFT_ALONE
        delay_s = self._rng.random() * self._usual_s[name]
        began = time.perf_counter()
        task = asyncio.ensure_future(self._calls[name]())
        try:
            await asyncio.sleep(0)  # it has begun
            if not is_left_alone:
                await asyncio.wait({task}, timeout=max(delay_s - _TIMER_S, 0.0))
                # Timers are not exact enough: calls may be shorter than a millisecond.
                while not task.done():
                    if time.perf_counter() - began >= delay_s:
                        break
                    await asyncio.sleep(0)
                task.cancel()
            async with asyncio.timeout(_PATIENCE_S):
                await asyncio.wait({task})
        finally:
            task.cancel()
        if task.cancelled():
            self._cancelled[name] += 1
        else:
            task.result()
            took_s = time.perf_counter() - began
            self._usual_s[name] += (took_s - self._usual_s[name]) / 8

    async def _put(self, keys: Sequence[str]) -> None:
        items = [(key, self._sources[key]) for key in keys]
        begun = {key: self._versions.begin(key) for key in keys}
        for key, source in items:
            source.fill_(begun[key])
        try:
            if len(items) == 1:
                await self._store.put(*items[0])
            else:
                expect(all(await self._store.put_many(items)), "one did not fit")
        finally:
            for _, source in items:
                source.fill_(_OVERWRITTEN)
        for key, version in begun.items():
            self._versions.end(key, version)

    async def _get(self) -> None:
        key = self._rng.choice(KEYS)
        self._versions.check_any(key, await self._store.get(key))

    async def _get_into(self, keys: Sequence[str]) -> None:
        places = [_full(key, _EMPTY) for key in keys]
        try:
            found: Sequence[torch.Tensor | None]
            if len(keys) == 1:
                found = [await self._store.get(keys[0], into=places[0])]
            else:
                found = await self._store.get_many(keys, places)
            for key, place, one in zip(keys, places, found, strict=True):
                self._versions.check(key, one)
                if one is None:
                    expect(_is_all(place, _EMPTY), "a miss has written to its place")
                else:
                    expect(one is place, "it is found elsewhere")
        finally:
            for place in places:
                place.fill_(_OVERWRITTEN)
            self._quiet += places

    async def _pin(self) -> None:
        keys = self._some(2)
        async with self._store.pin(keys) as found:
            for key, is_there in zip(keys, found, strict=True):
                value = await self._store.get(key)
                self._versions.check(key, value)
                expect(value is not None or not is_there, f"{key} was pinned, and left")

    async def _delete(self) -> None:
        (key,) = self._some(1)
        self._versions.begin_delete(key)
        await self._store.delete(key)
        self._versions.end(key)

    def _some(self, count: int) -> list[str]:
        return self._rng.sample(self._own, count)

    def _check_quiet(self, kept: int) -> None:
        """Nobody has written to what was given back; the last ones are kept longer."""
        while len(self._quiet) > kept:
            place = self._quiet.popleft()
            expect(_is_all(place, _OVERWRITTEN), "written to after its call had ended")


def _full(key: str, number: int) -> torch.Tensor:
    return torch.full((_COUNT_OF[key],), number, dtype=torch.int64)


def _is_all(tensor: torch.Tensor, number: int) -> bool:
    return bool((tensor == number).all())
