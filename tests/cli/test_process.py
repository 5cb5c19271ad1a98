from __future__ import annotations

import asyncio
import importlib.util

import pytest

from asynckv.cli.process import LoopName, run
from asynckv.errors import ConfigError

pytest.importorskip("uvloop").new_event_loop().close()  # its first makes a lasting pipe


async def name_of_the_loop() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


@pytest.mark.parametrize(
    ("chosen", "found"),
    [("auto", "uvloop"), ("uvloop", "uvloop"), ("asyncio", "asyncio")],
)
def test_work_runs_on_the_loop_that_was_chosen(chosen: LoopName, found: str) -> None:
    assert run(name_of_the_loop(), chosen) == found


def test_without_uvloop_work_runs_on_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert run(name_of_the_loop()) == "asyncio"
    with pytest.raises(ConfigError, match="not installed"):
        run(name_of_the_loop(), "uvloop")
