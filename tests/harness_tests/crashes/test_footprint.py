from __future__ import annotations

import asyncio

from asynckv.buffers.lookup import LookupBuffer
from asynckv.testing.blocked import until_blocked
from harness.crashes.footprint import Footprint


async def test_it_counts_what_is_in_use(local: LookupBuffer) -> None:
    before = Footprint.now(local)
    waiting = asyncio.create_task(local.drop_select([1]))
    await until_blocked(waiting)
    now = Footprint.now(local)
    waiting.cancel()
    assert (now.tasks - before.tasks, now.waiting) == (1, 1)
    assert now.resident_bytes > 2**20 and now.descriptors > 2
