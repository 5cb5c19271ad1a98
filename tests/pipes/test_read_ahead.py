from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asynckv.pipes import arrivals
from asynckv.pipes.arrivals import ReadAhead
from asynckv.testing.blocked import until


def made(
    monkeypatch: pytest.MonkeyPatch, wait_s: float = 0
) -> tuple[ReadAhead[str], Any]:
    monkeypatch.setattr(arrivals, "_WAIT_S", wait_s)
    begun: list[Any] = []
    return ReadAhead(begun.append), begun


async def test_what_nobody_asks_for_is_begun_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead, begun = made(monkeypatch)
    for name in "abcdef":
        ahead.add(name)
    assert not begun
    await until(lambda: len(begun) == 1)
    await until(lambda: len(begun) == 3)
    await until(lambda: begun == [*"abcdef"])
    assert ahead._timer is None


async def test_who_takes_what_it_gets_gets_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead, begun = made(monkeypatch, 3600)
    ahead.add("a")
    ahead.asked(into=False)
    assert begun == ["a"] and ahead._timer is None
    ahead.add("b")
    assert begun == ["a", "b"]
    ahead.asked(into=True)
    ahead.add("c")
    assert begun == ["a", "b"]
    ahead.forget("c")
    assert ahead._timer is None


async def test_nothing_is_begun_while_the_application_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead, begun = made(monkeypatch)
    ahead.is_paused = True
    ahead.add("a")
    for _ in range(10):
        await asyncio.sleep(0)
        assert not begun
    ahead.is_paused = False
    await until(lambda: begun == ["a"])


async def test_who_has_just_asked_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead, begun = made(monkeypatch, 3600)
    ahead.asked(into=True)
    ahead.add("a")
    ahead._look()
    assert not begun
    ahead._look()
    assert begun == ["a"]
    ahead.stop()
