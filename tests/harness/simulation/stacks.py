"""Where a coroutine is suspended, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ("where",)


def where(awaitable: Any) -> str:
    """Name each place on the way to the innermost one that it waits in."""
    return " > ".join(_places(awaitable)) or "nowhere"


def _places(inner: Any) -> Iterator[str]:
    while inner is not None:
        frame = _attribute(inner, "cr_frame", "gi_frame", "ag_frame")
        if frame is not None:
            yield f"{frame.f_code.co_qualname}:{frame.f_lineno}"
        inner = _attribute(inner, "cr_await", "gi_yieldfrom", "ag_await")


def _attribute(thing: Any, *names: str) -> Any:
    for name in names:
        value = getattr(thing, name, None)
        if value is not None:
            return value
    return None
