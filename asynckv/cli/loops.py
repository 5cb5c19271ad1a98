"""Which event loop a command runs on: the faster one, where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeAlias, TypeVar

from asynckv.errors import ConfigError

__all__ = ("LoopName", "run")

_T = TypeVar("_T")

LoopName: TypeAlias = Literal["auto", "asyncio", "uvloop"]


def run(work: Coroutine[Any, Any, _T], loop: LoopName = "auto") -> _T:
    """Do as ``asyncio.run`` does, on uvloop: if told, or by itself if it is there.

    :raises ConfigError: uvloop is to be used and is not installed
    """
    try:
        factory = _factory_of(loop)
    except ConfigError:
        work.close()
        raise
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def _factory_of(loop: LoopName) -> Callable[[], asyncio.AbstractEventLoop] | None:
    is_there = importlib.util.find_spec("uvloop") is not None
    if loop == "asyncio" or (loop == "auto" and not is_there):
        return None
    if not is_there:
        raise ConfigError(
            "uvloop is not installed",
            hint='in a checkout of asynckv: python -m pip install ".[fast]"',
        )
    import uvloop

    return uvloop.new_event_loop
