"""Calls of obstore: each ends when it has let go of the memory that it was lent.

obstore works in threads of its own, and reads memory where it lies. Its future says
that an answer has come, or that nobody wants one any more; the memory may be read for
some time after that. So it is lent by an object that dies when it is not read any more:
that is what is waited for. What is given up is let go of soon, also by a server that
is frozen.

One of those threads that is still at it while the interpreter ends takes the process
down, though its call was answered. So the end is waited for, too.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import anyio
import numpy
import obstore
from obstore.store import ObjectStore

from asynckv.waits.waiting import wait_shielded

__all__ = ("ObstoreCalls", "Stopped")

_T = TypeVar("_T")

_LOOK_S: Final = 0.001
_LONGEST_S: Final = 1.0


class Stopped(Exception):
    """The call was given up, as nobody needs it any more."""


class ObstoreCalls:
    """The calls of one tier. :meth:`aclose` gives up those that have not ended."""

    def __init__(self) -> None:
        self.is_stopping = False
        self._futures: set[asyncio.Future[Any]] = set()
        # Of futures that obstore's threads may have in hand. Called when the last of
        # them drops one, so by no code that could give the GIL away: it is C.
        self._held: set[weakref.ref[asyncio.Future[Any]]] = set()
        self._ends_in_order = False

    async def call(
        self,
        begin: Callable[[], Awaitable[_T]],
        readers: Sequence[weakref.ref[Any]] = (),
    ) -> _T:
        """Return what the call that is begun returns, when no ``readers`` are left.

        A cancelled wait gives the call up.

        :raises Stopped: the call was given up by :meth:`abort`
        :raises Exception: what obstore raises
        """
        if self.is_stopping:
            raise Stopped
        if not self._ends_in_order:
            self._ends_in_order = True
            atexit.register(self._block_until_let_go)
        future = asyncio.ensure_future(begin())
        self._held.add(weakref.ref(future, self._held.discard))
        self._futures.add(future)
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            future.cancel()
            await _wait_until_gone(readers, timeout_s=_LONGEST_S)
            raise
        except GeneratorExit:
            future.cancel()
            raise
        finally:
            self._futures.discard(future)
        await _wait_until_gone(readers)
        try:
            if future.cancelled():
                raise Stopped
            return future.result()
        finally:
            del future  # an error's traceback keeps this frame, and it the error

    async def put(
        self, store: ObjectStore, path: str, pieces: Iterable[memoryview]
    ) -> None:
        """Write an object of these pieces. They are not read any more when this ends.

        A cancelled wait gives the call up, and ends then, too; or after a second, if a
        file system hangs: then what it writes may be torn.

        :raises Stopped: the call was given up by :meth:`abort`
        :raises Exception: what obstore raises
        """
        lent: list[Any]
        lent = [numpy.frombuffer(one, numpy.uint8) for one in pieces if len(one)]
        readers = [weakref.ref(one) for one in lent]

        def begin() -> Awaitable[object]:
            # In one request: of several, some would stay behind if others failed.
            begun = obstore.put_async(store, path, list(lent), use_multipart=False)
            lent.clear()
            return begun

        await self.call(begin, readers)

    async def aclose(self) -> None:
        """Give up what has not ended, and wait until it is let go of: 1 s at most."""
        self.abort()
        with anyio.move_on_after(_LONGEST_S, shield=True):
            for _ in iter(self._is_held, False):
                await asyncio.sleep(_LOOK_S)  # who could tell must not: see __init__
        if not self._held:
            atexit.unregister(self._block_until_let_go)

    def abort(self) -> None:
        """Give up what has not ended. Never waits."""
        self.is_stopping = True
        for future in self._futures:
            future.cancel()

    def _is_held(self) -> bool:
        # What obstore drops without the GIL it lets go of at its next call.
        len(obstore.Bytes(b"-"))
        return bool(self._held)

    def _block_until_let_go(self) -> None:
        """At the end of the process, where nothing else is to be done."""
        pause, until_s = threading.Event(), time.monotonic() + _LONGEST_S
        while self._is_held() and time.monotonic() < until_s:
            pause.wait(_LOOK_S)


async def _wait_until_gone(
    readers: Sequence[weakref.ref[Any]], *, timeout_s: float | None = None
) -> None:
    """Wait until memory is read no more, however often that is cancelled."""
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()

    def look() -> None:
        if all(reader() is None for reader in readers):
            gone.set_result(None)
        elif not gone.cancelled():
            loop.call_later(_LOOK_S, look)

    look()
    try:
        # By no task: a loop that ends cancels those.
        await wait_shielded(gone, timeout_s=timeout_s)
    finally:
        gone.cancel()
