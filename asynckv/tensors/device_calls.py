"""Calls of CUDA that may take their time: an event loop waits, but not for ever."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from asynckv.errors import GPUFailed

__all__ = ("DeviceCalls",)

_LIMIT_S: Final = 30.0

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class _Returned(Generic[_T]):
    """What came of a call."""

    value: _T | None = None
    error: BaseException | None = None


class DeviceCalls:
    """Calls for one GPU, one at a time, each in a thread of its own.

    One that nobody waits for any more goes on, and what it returns is dropped; no other
    one is made before it has returned.
    """

    def __init__(self, limit_s: float = _LIMIT_S) -> None:
        self._limit_s = limit_s
        self._under_way: asyncio.Future[_Returned[object]] | None = None

    async def call(self, work: Callable[[], _T]) -> _T:
        """Return what ``work`` returns in its thread.

        A cancelled call waits for nothing.

        :raises GPUFailed: it, or the one before it, did not return in time
        :raises Exception: what ``work`` raises
        :raises RuntimeError: the process can have no more threads
        """
        try:
            async with asyncio.timeout(self._limit_s):
                while self._under_way is not None:
                    await asyncio.wait({self._under_way})
                future = self._start(work)
                await asyncio.wait({future})
        except TimeoutError:
            raise GPUFailed(
                f"CUDA has not answered within {self._limit_s:g} s",
                hint="the GPU or its driver is stuck: nvidia-smi",
            ) from None
        returned = future.result()
        if returned.error is not None:
            raise returned.error
        return returned.value  # type: ignore[return-value]

    def _start(self, work: Callable[[], _T]) -> asyncio.Future[_Returned[_T]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Returned[_T]] = loop.create_future()

        def run() -> None:
            try:
                returned = _Returned(work())
            except BaseException as exc:  # noqa: BLE001 - call() raises it on the loop
                returned = _Returned(error=exc)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(future.set_result, returned)

        # No daemon: one that is in torch while the interpreter ends takes it down.
        threading.Thread(target=run, name="asynckv-gpu-call", daemon=False).start()
        self._under_way = future  # type: ignore[assignment]
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: object) -> None:
        self._under_way = None
