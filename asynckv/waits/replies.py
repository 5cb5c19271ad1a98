"""Waiting for the one answer to a question, or until something has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from asynckv.shielding import wait_shielded

__all__ = (
    "Reply",
    "Waits",
    "Watchers",
)


T = TypeVar("T")


class Reply(Generic[T]):
    """One answer, awaited by one task, or by none any more. The first one counts."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def __await__(self) -> Generator[Any, None, T]:
        return self._future.__await__()

    @property
    def is_in(self) -> bool:
        """Whether it came, or is not awaited any more."""
        return self._future.done()

    @property
    def is_given_up(self) -> bool:
        """Whether who awaited it was cancelled: it may still come."""
        return self._future.cancelled()

    def give(self, value: T) -> None:
        """That is the answer. Never waits."""
        if not self._future.done():
            self._future.set_result(value)

    def fail(self, error: Exception) -> None:
        """There will be none. Never waits."""
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # it may be that nobody awaits it

    def check(self) -> None:
        """Raise what it failed by, if it has failed. Never waits."""
        if self._future.done() and not self._future.cancelled():
            self._future.result()


class Watchers:
    """Futures of those who wait for the next change of one object.

    Of ten thousand objects each has one who waits: he costs no list.
    """

    __slots__ = ("_first", "_others")

    def __init__(self) -> None:
        self._first: asyncio.Future[None] | None = None
        self._others: list[asyncio.Future[None]] | None = None

    def next_change(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Return what is done when the object has changed; look at it then."""
        # The loop is known to who waits; asked of asyncio it costs a system call.
        future: asyncio.Future[None] = loop.create_future()
        if self._first is None or self._first.done():  # he was cancelled
            self._first = future
        elif self._others is None:
            self._others = [future]
        else:
            self._others.append(future)
        return future

    def __len__(self) -> int:
        """How many wait."""
        every = (self._first, *(self._others or ()))
        return sum(future is not None and not future.done() for future in every)

    def wake(self) -> None:
        """The object has changed. Never waits."""
        first, others = self._first, self._others
        if first is None:
            return  # nor is there any other
        self._first = self._others = None
        if not first.done():
            first.set_result(None)
        for future in others or ():
            if not future.done():
                future.set_result(None)


class Waits:
    """Those of one object, each for something of its own that is over some time.

    One future a wait; :meth:`settle` looks at all of them. On the loop only.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waits: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    async def wait(
        self, is_over: Callable[[], bool], *, timeout_s: float | None
    ) -> None:
        """Wait until ``is_over()``. Within ``timeout_s`` it is shielded; else not."""
        if is_over():
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._waits.append((is_over, future))
        if timeout_s is None:
            await future
        else:
            await wait_shielded(future, timeout_s=timeout_s)

    def settle(self) -> None:
        """Something has changed."""
        waits, self._waits = self._waits, []
        for is_over, future in waits:
            if future.done():
                continue
            if is_over():
                future.set_result(None)
            else:
                self._waits.append((is_over, future))
