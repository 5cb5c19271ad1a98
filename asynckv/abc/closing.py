"""What every pipe, buffer and connector has in common: it is closed once."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import Self

__all__ = ("Closable",)


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
