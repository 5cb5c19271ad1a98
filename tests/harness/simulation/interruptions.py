"""How calls are cut short: by their task, a scope, a timeout, at any moment."""

from __future__ import annotations

import asyncio
import random
import types
from collections.abc import Coroutine, Generator
from typing import Any, Final

import anyio

__all__ = ("interrupt",)

_SHARE: Final = 0.3
_PATIENT: Final = 0.95
_DELAYS_S: Final = (0.0, 0.00002, 0.001, 0.01, 0.1, 1.0, 6.0)
_MAX_SUSPENSION: Final = 12


async def interrupt(
    call: Coroutine[Any, Any, None], chance: random.Random, *, patience_s: float
) -> None:
    """Run ``call`` in a task of its own, and perhaps cancel it at some moment.

    ``call`` hears of it as a ``CancelledError``. Waits until it has ended, which
    mostly is after ``patience_s`` at the latest.
    """
    way = chance.choice(("task", "scope", "timeout", "suspension", "completion"))
    if chance.random() >= _SHARE:
        way = ""
    if not way and chance.random() < _PATIENT:
        call = _in_timeout(call, patience_s)
    delay_s = 2 * chance.random() * chance.choice(_DELAYS_S)
    if way == "scope":
        call = _in_scope(call, delay_s)
    elif way == "timeout":
        call = _in_timeout(call, delay_s)
    elif way in ("suspension", "completion"):
        at = chance.randint(1, _MAX_SUSPENSION)
        call = _cancelled_at(call, at, at_completion=way == "completion")
    task = asyncio.create_task(call, name="a call")
    if way == "task":
        asyncio.get_running_loop().call_later(delay_s, task.cancel)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
    if not task.cancelled():
        task.result()


async def _in_scope(call: Coroutine[Any, Any, None], delay_s: float) -> None:
    with anyio.move_on_after(delay_s):
        await call


async def _in_timeout(call: Coroutine[Any, Any, None], delay_s: float) -> None:
    try:
        async with asyncio.timeout(delay_s):
            await call
    except TimeoutError:
        pass


async def _cancelled_at(
    call: Coroutine[Any, Any, None], at: int, *, at_completion: bool
) -> None:
    await _counted(call, at, at_completion)


@types.coroutine
def _counted(
    call: Coroutine[Any, Any, None], at: int, at_completion: bool
) -> Generator[Any, Any, None]:
    """Cancel the task at its suspension number ``at``, or when that one ends."""
    task, count = asyncio.current_task(), 0
    error: BaseException | None = None
    while True:
        try:
            awaited = call.send(None) if error is None else call.throw(error)
        except StopIteration:
            return
        count += 1
        if count == at and task is not None:
            if at_completion and isinstance(awaited, asyncio.Future):
                awaited.add_done_callback(lambda _: task.cancel())
            else:
                task.cancel()
        error = None
        try:
            yield awaited
        except GeneratorExit:
            call.close()
            raise
        except BaseException as exc:  # noqa: BLE001 - thrown in where it belongs
            error = exc
