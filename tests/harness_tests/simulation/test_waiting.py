from __future__ import annotations

import asyncio

import pytest

from asynckv.buffers.entries.leases import Matcher
from asynckv.buffers.lookup import LookupBuffer
from asynckv.testing.blocked import until_blocked
from harness.simulation.waiting import WaitingSelects


async def test_who_waits_beside_its_match_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with LookupBuffer("1MiB", drain_s=0) as buffer:
        waiting = WaitingSelects(buffer)
        select = asyncio.ensure_future(buffer.drop_select([1, 2]))
        await until_blocked(select)
        assert waiting.beside_their_match() == {}
        with monkeypatch.context() as patch:
            patch.setattr(Matcher, "next_for", lambda self, entry: None)
            await buffer.insert([1], None, None, None, None, entry_id="e1")
        assert list(waiting.beside_their_match().values()) == ["e1"]
        select.cancel()
