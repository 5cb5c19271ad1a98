from __future__ import annotations

from asynckv.testing.crashes.run import kill_workers, leave_under_load


async def test_a_few_kills_break_no_promise() -> None:
    found = await kill_workers("tcp://127.0.0.1:0", kills=4, seed=1, couples=1)
    assert found.kills >= 4 and found.inserted
    assert found.wrongs == ()


async def test_leaving_under_load_loses_nothing() -> None:
    found = await leave_under_load("tcp://127.0.0.1:0", seed=1, couples=1, steps=8)
    assert found.inserted and found.wrongs == ()
