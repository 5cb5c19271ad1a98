"""Commands that run until somebody ends them: Ctrl-C, SIGTERM and SIGHUP alike."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import TypeVar

__all__ = ("INTERRUPTED", "until_ended")

_T = TypeVar("_T")

INTERRUPTED = 130
"""The exit status of a command that was interrupted."""

_POLITE_ENDS = (signal.SIGTERM, signal.SIGHUP)


async def until_ended(work: Coroutine[object, object, _T]) -> _T:
    """Run ``work``; a polite end of the process is a cancellation of it."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    if task is not None:
        for number in _POLITE_ENDS:
            loop.add_signal_handler(number, task.cancel)
    try:
        return await work
    finally:
        for number in _POLITE_ENDS:
            loop.remove_signal_handler(number)
