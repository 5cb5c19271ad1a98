"""Two stores on one far tier: nobody finds a value of before what it knows of.

What the other one has put, and not told the tier of yet, may come at any time.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TypeAlias

import torch
from hypothesis import given, settings, strategies as st

from asynckv.stores.tiered import TieredStore
from harness.tiers import DictTier

NBYTES = 4096
KINDS = (
    *("put", "failed put", "delete", "clear", "get", "pin", "evict", "fetch", "let go"),
)
Step: TypeAlias = tuple[str, int]

STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from([0, 0, 1])), max_size=40
)


@dataclasses.dataclass
class Change:
    """Of a key, by one store: a number that its value is made of, or none."""

    by: int
    number: int | None
    is_told: bool = False
    """Does the tier know?"""
    to_come: set[int | None] = dataclasses.field(default_factory=set)
    """What others had put before, and not told the tier of."""


def value_of(number: int) -> torch.Tensor:
    return torch.full((NBYTES // 8,), number, dtype=torch.int64).view(torch.uint8)


class TwoStores:
    """Makes steps, and knows what each store may still find."""

    def __init__(self) -> None:
        values: dict[str, bytes] = {}
        self.tiers = [DictTier(values), DictTier(values)]
        self.stores = [
            TieredStore(16 * NBYTES, [tier], drain_s=0.1) for tier in self.tiers
        ]
        self.changes: list[Change] = []
        self.held: set[int] = set()
        self.puts = 0

    async def run(self, steps: list[Step]) -> None:
        async with self.stores[0], self.stores[1]:
            for step in steps:
                await self.make(*step)
            for index in range(2):
                self.let_go(index)
                await self.flush(index)
                await self.get(index)

    async def make(self, what: str, index: int) -> None:
        store, tier = self.stores[index], self.tiers[index]
        if what == "put":
            await self.put(index)
        elif what == "failed put":
            tier.fails.add("store")
            await self.put(index)
            await self.flush(index)
            tier.fails.clear()
        elif what == "delete":
            self.let_go(index)  # it asks the tier whether the key is there
            self.change(index, None)
            await store.delete("a")
        elif what == "clear":
            self.change(index, None)
            await store.clear()
        elif what == "pin":
            async with store.pin(["a"], within_s=0):
                await self.get(index)
        elif what == "fetch":  # it is on its way while other things happen
            await self.evict(index)
            self.hold(index)
            await self.get(index)
        elif what == "let go":
            self.let_go(index)
        elif what == "evict":
            await self.evict(index)
        else:
            await self.get(index)

    async def put(self, index: int) -> None:
        self.puts += 1
        self.change(index, self.puts)
        await self.stores[index].put("a", value_of(self.puts))

    def change(self, index: int, number: int | None) -> None:
        others = (one for one in self.changes if one.by != index and not one.is_told)
        to_come = {one.number for one in others}
        self.changes.append(Change(index, number, to_come=to_come))

    async def flush(self, index: int) -> None:
        await self.stores[index].flush()
        for change in self.changes:
            change.is_told |= change.by == index

    def hold(self, index: int) -> None:
        if index not in self.held:
            self.held.add(index)
            self.tiers[index].hold("fetch")

    def let_go(self, index: int) -> None:
        if index in self.held:
            self.held.discard(index)
            self.tiers[index].let_go("fetch")

    async def evict(self, index: int) -> None:
        """Fill memory with what is deleted again."""
        await self.flush(index)  # what waits to be written stays in memory
        store = self.stores[index]
        for number in range(16):
            await store.put(f"filler {number}", value_of(0))
        for number in range(16):
            store.values.remove(f"filler {number}", None)

    async def get(self, index: int) -> None:
        """What is found is the last that this store knows of, or is another one's."""
        changes = self.changes
        mine = [n for n, change in enumerate(changes) if change.by == index]
        last = max(mine, default=0)
        allowed = {change.number for change in changes[last:]}
        if mine:
            allowed |= changes[last].to_come
        getting = asyncio.create_task(self.stores[index].get("a"))
        if index in self.held:
            for _ in range(20):
                await asyncio.sleep(0)
            if not getting.done():
                getting.cancel()
                await asyncio.wait([getting])
                return
        found = await getting
        if found is not None:
            number = int(found.view(torch.int64)[0])
            assert torch.equal(found, value_of(number)), "it is a mix"
            assert number in allowed, f"{number} is older than {allowed}"


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_nobody_finds_what_is_older_than_its_own_last_change(
    steps: list[Step],
) -> None:
    asyncio.run(TwoStores().run(steps))
