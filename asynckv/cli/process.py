"""The process that a command runs in: its event loop, its end, and its machine.

The loop is the faster one, where that is installed; Ctrl-C, SIGTERM and SIGHUP end a
command alike. One that has something to do before its end hears of the first of them by
:func:`stop_signal`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import platform
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Literal, TypeAlias, TypeVar

from asynckv.errors import ConfigError

__all__ = (
    "INTERRUPTED",
    "LoopName",
    "describe_host",
    "end_process_on",
    "processor",
    "run",
    "stop_signal",
    "until_ended",
)


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


INTERRUPTED = 130
"""The exit status of a command that was interrupted."""

_POLITE_ENDS = (signal.SIGTERM, signal.SIGHUP)


def end_process_on(*numbers: signal.Signals) -> None:
    """Let each of these signals end the process at once.

    The kernel does that, but not of the first process of a container.
    """
    for number in numbers:
        if os.getpid() == 1:
            signal.signal(number, lambda one, _: os._exit(128 + one))
        else:
            signal.signal(number, signal.SIG_DFL)


def _not_ignored(*numbers: signal.Signals) -> list[signal.Signals]:
    """Return those that whoever started the process wants heard: not as ``nohup``."""
    return [one for one in numbers if signal.getsignal(one) != signal.SIG_IGN]


async def until_ended(work: Coroutine[object, object, _T]) -> _T:
    """Run ``work``; a polite end of the process is a cancellation of it."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    numbers = _not_ignored(*_POLITE_ENDS)
    if task is not None:
        for number in numbers:
            loop.add_signal_handler(number, task.cancel)
    try:
        return await work
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def stop_signal() -> Iterator[asyncio.Future[str]]:
    """Yield what has the name of the first signal that is to end the process.

    The second one ends it at once, whatever the loop is doing.
    """
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[str] = loop.create_future()
    numbers = _not_ignored(*_POLITE_ENDS, signal.SIGINT)
    interrupts = signal.getsignal(signal.SIGINT)

    def stop(number: signal.Signals) -> None:
        if stopped.done():  # it came before that
            os.kill(os.getpid(), number)
        else:
            stopped.set_result(number.name)

    for number in numbers:
        loop.add_signal_handler(number, stop, number)
        # In the place of the loop's, which does nothing: that one only wakes it.
        signal.signal(number, lambda *_: end_process_on(*numbers))
    try:
        yield stopped
    finally:
        stopped.cancel()  # unless a signal came
        for number in numbers:
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGINT, interrupts)


def processor() -> str:
    """Return the model of the processor, or its architecture."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def describe_host() -> str:
    """Return processor, cores, load average and system in one line."""
    load = f"load {os.getloadavg()[0]:.1f} before"
    system = f"{platform.system()} {platform.release()}"
    return f"{processor()}, {os.cpu_count() or 1} cores, {load}, {system}"
