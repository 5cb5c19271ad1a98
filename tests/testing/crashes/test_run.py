from __future__ import annotations

from asynckv.testing.crashes.run import kill_workers


async def test_a_few_kills_break_no_promise() -> None:
    found = await kill_workers("tcp://127.0.0.1:0", kills=4, seed=1, couples=1)
    assert found.kills >= 4 and found.inserted
    assert found.wrongs == ()
