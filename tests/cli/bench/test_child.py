from __future__ import annotations

import os

import pytest

from asynckv.cli.bench import server as child
from asynckv.cli.bench.server import ServerEnded, own_child

# On a busy machine most of a process's time goes into its imports.
pytestmark = [pytest.mark.timeout(180), pytest.mark.multiprocess]

SERVES = """
import asyncio, os
from asynckv.cli.bench import server as child
from asynckv.cli.bench.server import until_hung_up
print(os.getpid(), flush=True)
asyncio.run(until_hung_up())
"""
DEAF = """
import os, time
print(os.getpid(), flush=True)
while True: time.sleep(60)
"""


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_child_ends_when_it_is_hung_up_on() -> None:
    async with own_child("-c", SERVES) as line:
        pid = int(line)
        assert is_there(pid)
    assert not is_there(pid)


async def test_a_child_that_does_not_hear_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child, "_STOP_GRACE_S", 0.1)
    async with own_child("-c", DEAF) as line:
        pid = int(line)
    assert not is_there(pid)


async def test_a_child_that_says_nothing_is_an_error() -> None:
    with pytest.raises(ServerEnded, match="status 7"):
        async with own_child("-c", "raise SystemExit(7)"):
            raise AssertionError
