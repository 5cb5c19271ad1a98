"""What every pipe, buffer and connector has in common: it is closed once."""

from __future__ import annotations

import abc
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from asynckv.errors import PeerLost

__all__ = ("AsyncWithOnly", "Closable", "async_with_only")

_P = ParamSpec("_P")
_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class AsyncWithOnly:
    """Mixed into what ``async with`` enters, to say so to ``with`` and ``await``.

    ``_entered_by`` is what users write there: ``"connect(...) as peer"``.
    """

    _entered_by: str

    # Type checkers find the mistake where there are no such methods.
    if not TYPE_CHECKING:

        def __enter__(self) -> None:
            raise self._misused("with")

        def __exit__(self, *exc_info: object) -> None: ...

        def __await__(self) -> None:
            raise self._misused("await")

        def _misused(self, how: str) -> TypeError:
            return TypeError(f"not for {how!r}; write: async with {self._entered_by}:")


class _Managed(AbstractAsyncContextManager[_T_co, bool | None], AsyncWithOnly):
    """What a function returns that is decorated by :func:`async_with_only`."""

    def __init__(
        self,
        manager: AbstractAsyncContextManager[_T_co, bool | None],
        entered_by: str,
    ) -> None:
        self._manager = manager
        self._was_entered = False
        self._entered_by = entered_by

    async def __aenter__(self) -> _T_co:
        if self._was_entered:
            raise RuntimeError(
                f"it was entered before; make a new one: async with {self._entered_by}:"
            )
        self._was_entered = True
        try:
            return await self._manager.__aenter__()
        except PeerLost as exc:
            exc.with_traceback(None)  # its text says more than frames of ours
            raise

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._manager.__aexit__(exc_type, exc, traceback)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> None:
            raise AttributeError(
                f"no {name!r} before it is entered; "
                f"write: async with {self._entered_by}:"
            )


def async_with_only(
    entered_by: str,
) -> Callable[
    [Callable[_P, AsyncIterator[_T]]],
    Callable[_P, AbstractAsyncContextManager[_T, bool | None]],
]:
    """As ``contextlib.asynccontextmanager``, but ``with`` and ``await`` are answered.

    ``entered_by`` is what users write after ``async with``.
    """

    def decorate(
        function: Callable[_P, AsyncIterator[_T]],
    ) -> Callable[_P, AbstractAsyncContextManager[_T, bool | None]]:
        manage = asynccontextmanager(function)

        @functools.wraps(function)
        def managed(
            *args: _P.args, **kwargs: _P.kwargs
        ) -> AbstractAsyncContextManager[_T, bool | None]:
            return _Managed(manage(*args, **kwargs), entered_by)

        return managed

    return decorate


class Closable(abc.ABC):
    """Something that is closed once, by ``async with`` or by hand."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close cleanly, in bounded time, also while being cancelled, also again."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Close now, without a word to anybody. Never waits."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
