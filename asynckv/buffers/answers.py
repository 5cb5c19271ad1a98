"""What a peer says last on a stream: an answer, or why there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from asynckv.errors import AsyncKVError, RemoteProtocolError
from asynckv.protocol.failures import from_failure
from asynckv.protocol.frames import Cancelled, Failure, Frame

__all__ = ("Answer", "fail_by")

T = TypeVar("T")


class Answer(Generic[T]):
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


def fail_by(frame: Frame, request: str, fail: Callable[[Exception], None]) -> None:
    """Call ``fail`` with what a frame means to ``request`` that is no answer to it.

    :raises RemoteProtocolError: it makes no sense at all
    """
    match frame:
        case Failure():
            fail(from_failure(frame))
        case Cancelled():
            fail(AsyncKVError(f"the peer gave the {request} up"))
        case _:
            error = RemoteProtocolError(f"no {type(frame).__name__} belongs here")
            fail(error)  # of a last frame's stream nobody else is told
            raise error
