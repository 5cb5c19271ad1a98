"""A tier in this process that does what it is told to: late, wrong, or not at all."""

from __future__ import annotations

import asyncio
import collections
import math
import time
from collections.abc import Sequence

from asynckv.abc import (
    StoreTier,
    TierFacts,
    TierPrefix,
    TierResult,
    TierValue,
    WantedValue,
)

__all__ = ("DictTier",)


class DictTier(StoreTier):
    """Keeps values in ``values``, which outlives it: header and bytes of each key.

    ``fails`` has the names of calls that fail, ``raises`` of those that raise,
    ``refuses`` has ``clear`` if it cannot do that.
    ``hold(name)`` keeps calls of that name from ending, until they are let go on;
    ``read`` is a fetch that has read what there is, and not said so.
    """

    def __init__(
        self,
        values: dict[str, bytes] | None = None,
        facts: TierFacts | None = None,
    ) -> None:
        self.values = {} if values is None else values
        self.facts = facts or TierFacts(patience_s=30.0)
        self.expiries: dict[str, float] = {}
        self.is_there = True
        self.fails: set[str] = set()
        self.raises: set[str] = set()
        self.refuses: set[str] = set()
        self.calls: collections.Counter[str] = collections.Counter()
        self.asked: collections.Counter[str] = collections.Counter()
        self.touched: list[str] = []
        self.flips_bits = False
        self.is_closed = False
        self._gates: dict[str, asyncio.Event] = {}

    def hold(self, name: str) -> None:
        """Let calls of that name begin, and not end."""
        self._gates[name] = asyncio.Event()

    def let_go(self, name: str) -> None:
        """Let them end."""
        self.let_others_go(name).set()

    def let_others_go(self, name: str) -> asyncio.Event:
        """Let those that begin now end; return what lets the others go on."""
        return self._gates.pop(name)

    async def probe(self) -> TierFacts:
        await self._enter("probe")
        if not self.is_there:
            raise OSError("nobody is there")
        return self.facts

    async def contains(self, keys: Sequence[str]) -> Sequence[TierResult]:
        await self._enter("contains")
        now_s = time.time()
        return [
            self._result(
                "contains",
                key in self.values and self.expiries.get(key, math.inf) > now_s,
            )
            for key in keys
        ]

    async def fetch(self, wanted: Sequence[WantedValue]) -> Sequence[TierResult]:
        self.asked.update(one.key for one in wanted)
        found = [self.values.get(one.key) for one in wanted]
        await self._enter("read")
        places = []
        for one, data in zip(wanted, found, strict=True):
            places.append(None if data is None else await one.place(data))
        await self._enter("fetch")
        results = []
        for one, data, place in zip(wanted, found, places, strict=True):
            if data is not None and place is not None and "fetch" not in self.fails:
                self._land(one, data, place.pieces)
            is_refused = data is not None and place is None
            result = self._result("fetch", data is not None)
            results.append(TierResult.REFUSED if is_refused else result)
        return results

    async def store(self, values: Sequence[TierValue]) -> Sequence[TierResult]:
        copies = [(one.key, one.header + b"".join(one.memory.pieces)) for one in values]
        await self._enter("store")
        if "store" in self.fails:
            return [TierResult.FAILED] * len(values)
        self.values.update(copies)
        for one in values:
            one.moved_nbytes += one.nbytes
            self.expiries[one.key] = one.expires_at_s or math.inf
        return [TierResult.DONE] * len(values)

    async def delete(self, keys: Sequence[str]) -> Sequence[TierResult]:
        await self._enter("delete")
        if "delete" in self.fails:
            return [TierResult.FAILED] * len(keys)
        for key in keys:
            self.values.pop(key, None)
        return [TierResult.DONE] * len(keys)

    async def clear(self, prefix: TierPrefix) -> TierResult:
        began = [key for key in self.values if key.startswith(prefix.prefix)]
        await self._enter("clear")
        if "clear" in self.fails:
            return TierResult.FAILED
        if "clear" in self.refuses:
            return TierResult.REFUSED
        for key in began:
            self.values.pop(key, None)
        prefix.moved_nbytes += 1
        return TierResult.DONE

    async def touch(self, keys: Sequence[str]) -> None:
        self.touched += keys

    async def aclose(self) -> None:
        self.abort()

    def abort(self) -> None:
        self.is_closed = True

    def _land(
        self, wanted: WantedValue, data: bytes, pieces: Sequence[memoryview]
    ) -> None:
        start = wanted.header_nbytes
        for piece in pieces:
            piece[:] = data[start : start + len(piece)]
            start += len(piece)
            wanted.moved_nbytes += len(piece)
        if self.flips_bits and pieces and len(pieces[0]):
            pieces[0][0] ^= 1

    async def _enter(self, name: str) -> None:
        self.calls[name] += 1
        if name in self._gates:
            await self._gates[name].wait()
        if name in self.raises:
            raise RuntimeError(f"{name} does not work")

    def _result(self, name: str, is_there: bool) -> TierResult:
        if name in self.fails:
            return TierResult.FAILED
        return TierResult.DONE if is_there else TierResult.MISSING
