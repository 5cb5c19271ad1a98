from __future__ import annotations

import math

from asynckv.buffers.lookup import LookupBuffer
from harness.simulation.stays import Stays


async def test_each_moment_of_a_stay_is_noted() -> None:
    now = [1.0]
    async with LookupBuffer("1MiB", drain_s=0) as buffer:
        stays = Stays(buffer, lambda: now[0])
        await buffer.insert([1], None, None, None, None, entry_id="e1")
        (stay,) = stays.of("e1")
        assert (stay.came, stay.committed, stay.left) == (1.0, 1.0, math.inf)
        now[0] = 2.0
        assert await buffer.withdraw("e1")
        assert (stay.left, stay.reason) == (2.0, "withdrawn")


async def test_what_comes_again_has_another_stay() -> None:
    async with LookupBuffer("1MiB", drain_s=0) as buffer:
        stays = Stays(buffer, lambda: 1.0)
        for _ in range(2):
            await buffer.insert([1], None, None, None, None, entry_id="e1")
            await buffer.withdraw("e1")
        assert [stay.reason for stay in stays.of("e1")] == ["withdrawn"] * 2
        assert not stays.of("e2")
