"""``python -m harness.object_worker URL COUNT``: forks so many, says how they ended.

Each puts and gets by a tier there, and ends: half of them close it, the others forget
to. To fork them takes less than to import torch in each.
"""

from __future__ import annotations

import asyncio
import os
import sys

from asynckv.abc.tiers import TierResult
from asynckv.stores.objects import ObjectTier
from asynckv.testing.tier_checks import SomeValue

__all__ = ()


async def _use(url: str, *, closes: bool) -> None:
    tier = ObjectTier.from_url(url)
    value, wanted = SomeValue("k1/a", 300_000, 1), SomeValue("k1/a", 300_000)
    await tier.probe()
    results = [*await tier.store([value.to_store()]), *await tier.fetch([wanted])]
    if results != [TierResult.DONE] * 2 or not wanted.is_one_of(1):
        raise AssertionError(results)
    if closes:
        await tier.aclose()


def _main(url: str, count: int) -> None:
    pids = []
    for number in range(count):
        pids.append(pid := os.fork())
        if not pid:
            asyncio.run(_use(url, closes=number % 2 == 0))
            return  # and so ends as every interpreter does
    for pid in pids:
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
