"""Where a suspended coroutine is, through everything that it awaits."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from types import FrameType
from typing import Any, Literal

__all__ = ("frames_of", "trail", "where")


def frames_of(coroutine: object) -> Iterator[FrameType]:
    """Yield the frames in which it is suspended, from the outermost call inwards."""
    inner: object = coroutine
    while inner is not None:
        if (frame := _attribute(inner, "frame")) is not None:
            yield frame
        awaited = _attribute(inner, "await")
        if awaited is not None and not isinstance(awaited, asyncio.Future):
            awaited = _unwrapped(awaited)
        inner = awaited


def where(coroutine: object) -> str:
    """Name the innermost place where it is suspended, ``"?"`` if it does not tell."""
    frames = list(frames_of(coroutine))
    if not frames:
        return "?"
    return f"{frames[-1].f_code.co_qualname} (line {frames[-1].f_lineno})"


def trail(coroutine: object) -> list[str]:
    """Name each place where it is suspended, from the outermost call inwards."""
    return [
        f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        for frame in frames_of(coroutine)
    ]


def _unwrapped(awaited: object) -> object:
    """What ``__await__`` and ``anext`` return hides what it runs."""
    if _attribute(awaited, "frame") is None:
        for inner in gc.get_referents(awaited):
            if _attribute(inner, "frame") is not None:
                return inner
    return awaited


def _attribute(coroutine: object, name: Literal["frame", "await"]) -> Any:
    of_generators = {"frame": "gi_frame", "await": "gi_yieldfrom"}[name]
    for attribute in (f"cr_{name}", f"ag_{name}", of_generators):
        if (value := getattr(coroutine, attribute, None)) is not None:
            return value
    return None
