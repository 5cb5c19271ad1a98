from __future__ import annotations

import pytest

import asynckv
from asynckv.cli.bench.meeting import MEETING_KEY, meeting_from
from asynckv.cli.bench.serving import serving
from asynckv.cli.bench.settings import Settings


async def test_who_is_let_in_learns_where_the_baselines_are() -> None:
    async with serving("tcp://127.0.0.1:0", Settings()) as url:
        async with asynckv.connect(url) as peer:
            found = await peer.store.get(MEETING_KEY)
    assert found is not None
    meeting = meeting_from(found)
    assert meeting.raw_port != meeting.streams_port
    assert any(meeting.token)


async def test_beyond_this_host_it_asks_for_protection() -> None:
    with pytest.raises(asynckv.ConfigError):
        async with serving("tcp://0.0.0.0:0", Settings()):
            pass
