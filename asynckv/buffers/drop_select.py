"""The two faces of one ``drop_select``: a coroutine, and a context manager."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any

from asynckv.abc import DropSelect, KVEntry

__all__ = ("PendingSelect",)


class PendingSelect(DropSelect):
    """Takes an entry when awaited, borrows one when entered.

    ``take`` and ``borrow`` are called at the first use, and only one of them.
    """

    def __init__(
        self,
        take: Callable[[], Coroutine[Any, Any, KVEntry]],
        borrow: Callable[[], AbstractAsyncContextManager[KVEntry, bool | None]],
    ) -> None:
        self._take = take
        self._borrow = borrow
        self._coroutine: Coroutine[Any, Any, KVEntry] | None = None
        self._context: AbstractAsyncContextManager[KVEntry, bool | None] | None = None
        self._used = False

    def __await__(self) -> Generator[Any, Any, KVEntry]:
        return self._begin().__await__()

    def send(self, value: Any, /) -> Any:
        return self._running().send(value)

    def throw(self, *error: Any) -> Any:
        return self._running().throw(*error)

    def close(self) -> None:
        self._used = True
        if self._coroutine is not None:
            self._coroutine.close()

    async def __aenter__(self) -> KVEntry:
        self._use()
        self._context = self._borrow()
        return await self._context.__aenter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        if self._context is None:
            raise RuntimeError("this drop_select was never entered")
        return await self._context.__aexit__(exc_type, exc, traceback)

    def _running(self) -> Coroutine[Any, Any, KVEntry]:
        return self._begin() if self._coroutine is None else self._coroutine

    def _begin(self) -> Coroutine[Any, Any, KVEntry]:
        self._use()
        self._coroutine = self._take()
        return self._coroutine

    def _use(self) -> None:
        if self._used:
            raise RuntimeError(
                "this drop_select was used before; call drop_select again"
            )
        self._used = True
