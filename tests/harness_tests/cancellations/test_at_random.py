"""A store that breaks its promise to who cancels is found out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from asynckv.buffers.store import StoreBuffer
from harness.cancellations.at_random import KEYS, Versions, cancel_at_random

BROKEN = {
    "reads late": "is torn",
    "writes late": "written to after",
    "goes back": r"has \d+, not of",
    "mixes up keys": "never put there|not of|numbers",
}


class BrokenStore(StoreBuffer):
    """Right, but for what is ``wrong``, where it is cancelled."""

    def __init__(self, wrong: str) -> None:
        super().__init__("64MiB")
        self.wrong = wrong
        self.kept: dict[str, torch.Tensor] = {}

    async def put(
        self,
        key: str,
        value: torch.Tensor | None,
        *,
        ttl_s: float | None = None,
        pin: bool = False,
    ) -> None:
        assert value is not None
        kept = value.clone()
        old = self.kept.get(key, kept)

        def end() -> None:
            if self.wrong == "reads late":
                kept[1:] = value[1:]
            self.kept[key] = kept

        await self.wait("reads late", end)
        end()
        if self.wrong == "goes back":
            self.kept[key] = old

    async def get(
        self, key: str, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        if self.wrong == "mixes up keys" and into is None:
            key = KEYS[0]
        found = self.kept.get(key)
        if found is None or into is None:
            await self.wait("", lambda: None)
            return found
        await self.wait("writes late", lambda: into.copy_(found))
        return into.copy_(found)

    async def delete(self, key: str) -> bool:
        return self.kept.pop(key, None) is not None

    async def wait(self, wrong: str, end: Callable[[], object]) -> None:
        """Wait for some turns; once cancelled, do the rest all the same."""
        try:
            for _ in range(20):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if self.wrong == wrong:
                asyncio.get_running_loop().call_soon(end)
            raise


@pytest.mark.parametrize("wrong", BROKEN)
async def test_what_a_broken_store_does_is_found(wrong: str) -> None:
    versions = Versions()
    async with BrokenStore(wrong) as store:
        for key in KEYS:
            await versions.put(store, key)
        with pytest.raises(AssertionError, match=BROKEN[wrong]) as failure:
            await cancel_at_random(store, versions, 1000, seed=1)
    assert any("seed 1" in note for note in failure.value.__notes__)


async def test_one_that_keeps_it_is_not() -> None:
    async with StoreBuffer("16MiB") as store:
        cancelled = await cancel_at_random(store, Versions(), 50, seed=1)
    assert sum(cancelled.values()) >= 50
