"""Waiting for marks in streams of GPUs, beside the event loop and all copies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable
from typing import Final

from asynckv.devices.cuda import Event
from asynckv.errors import GPUFailed

__all__ = ("StreamMarks",)

_IDLE_S: Final = 0.5
"""A thread without work for as long ends; the next work starts another."""

_SHORTEST_S: Final = 20e-6
_LONGEST_S: Final = 1e-3

_names = itertools.count(1)


@dataclasses.dataclass(eq=False)
class _Waiting:
    mark: Event
    tell: Callable[[Exception | None], None]
    is_wanted: bool = True


class StreamMarks:
    """Looks at marks in a thread, which it has while there are any.

    No copy waits behind a stream that is still at work, and no waiting is kept by one.
    """

    def __init__(self, *, limit_s: float = 60.0) -> None:
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._has_thread = False
        self._is_closed = False

    def close(self) -> None:
        """Let the thread end with what it has to do. Never waits, nor forbids more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    async def reached(self, mark: Event | None) -> None:
        """Wait until a stream has done what it was given before ``mark``.

        A cancelled call leaves no trace, and ends at once.

        :raises GPUFailed: it failed, or is not done after ``limit_s``
        """
        if mark is None:
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def tell(error: Exception | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, future, error)

        one = _Waiting(mark, tell)
        with self._changed:
            self._start_thread()
            self._waiting.append(one)
            self._changed.notify()
        try:
            # The loop's own clock: a call of CUDA may keep the thread for ever.
            done, _ = await asyncio.wait({future}, timeout=self._limit_s)
        finally:
            one.is_wanted = False
            future.cancel()
        if not done:
            raise GPUFailed(
                f"the engine's stream has not got on within {self._limit_s:g} s",
                hint="the GPU or its driver is stuck: nvidia-smi",
            )
        future.result()

    def _start_thread(self) -> None:
        if not self._has_thread:
            name = f"asynckv-gpu-marks-{next(_names)}"
            # No daemon: see CopyPool. It ends when it has no work.
            threading.Thread(target=self._work, name=name, daemon=False).start()
            self._has_thread = True

    def _work(self) -> None:
        pause_s = _SHORTEST_S
        while True:
            with self._changed:
                if not self._waiting and not self._is_closed:
                    self._changed.wait(_IDLE_S)
                if not self._waiting:  # what came as it woke up is waited for too
                    self._has_thread = False
                    return
                before = list(self._waiting)
            left = [one for one in before if not _is_over(one)]
            with self._changed:
                seen = len(before)
                self._waiting[:seen] = left
            pause_s = _SHORTEST_S if len(left) < seen else min(2 * pause_s, _LONGEST_S)
            if left:
                # Polled, as synchronize() waits for one mark, and these are many.
                time.sleep(pause_s)  # noqa: TID251 - a thread's


def _is_over(one: _Waiting) -> bool:
    """Look whether a mark was reached, and tell who waits."""
    if not one.is_wanted:
        return True
    try:
        if one.mark.query():
            one.tell(None)
            return True
    except Exception as exc:  # noqa: BLE001 - told to whoever waits
        one.tell(exc)
        return True
    return False


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
