"""What every pipe, buffer and connector has in common: it is closed once."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Self

__all__ = ("AsyncWithOnly", "Closable")


class AsyncWithOnly:
    """Mixed into what ``async with`` enters, to say so to ``with`` and ``await``.

    ``_made_by`` is the call that users write there.
    """

    _made_by: ClassVar[str]

    # Type checkers find the mistake where there are no such methods.
    if not TYPE_CHECKING:

        def __enter__(self) -> None:
            raise TypeError(f"write 'async with {self._made_by}', not 'with'")

        def __exit__(self, *exc_info: object) -> None: ...

        def __await__(self) -> None:
            raise TypeError(f"write 'async with {self._made_by}', not 'await'")


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
