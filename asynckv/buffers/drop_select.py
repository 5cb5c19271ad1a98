"""The two faces of one ``drop_select``: a coroutine, and a context manager."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any

from asynckv.abc import DropSelect, KVEntry
from asynckv.buffers.queries import Query
from asynckv.tensors.blocks import KVMemory

__all__ = ("PendingSelect",)

_Targets = Mapping[str, KVMemory]
_Borrowed = AbstractAsyncContextManager[KVEntry, bool | None]


class PendingSelect(DropSelect):
    """Takes an entry when awaited, borrows one when entered.

    ``take`` and ``borrow`` are called at the first use, and only one of them,
    with ``query`` and ``targets``.
    """

    _coroutine: Coroutine[Any, Any, KVEntry] | None = None
    _context: _Borrowed | None = None
    _used = False

    def __init__(
        self,
        take: Callable[[Query, _Targets], Coroutine[Any, Any, KVEntry]],
        borrow: Callable[[Query, _Targets], _Borrowed],
        query: Query,
        targets: _Targets,
    ) -> None:
        self._take = take
        self._borrow = borrow
        self._query = query
        self._targets = targets

    def __repr__(self) -> str:
        return f"<drop_select, {'used' if self._used else 'not used yet'}>"

    def __del__(self) -> None:
        if not self._used and not sys.is_finalizing():
            warnings.warn(
                "drop_select(...) was never awaited, nor entered by 'async with'",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )

    def __await__(self) -> Generator[Any, Any, KVEntry]:
        self._use()
        return self._take(self._query, self._targets).__await__()

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
        self._context = self._borrow(self._query, self._targets)
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
        if self._coroutine is None:
            self._use()
            self._coroutine = self._take(self._query, self._targets)
        return self._coroutine

    def _use(self) -> None:
        if self._used:
            raise RuntimeError(
                "this drop_select was used before; call drop_select again"
            )
        self._used = True
