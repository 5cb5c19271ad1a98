"""What a worker can do whose step may be over before anybody waits for its saves."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol, runtime_checkable

__all__ = ("BeginsToWait",)


@runtime_checkable
class BeginsToWait(Protocol):
    """A worker that several share a step with: see :class:`MultiWorker`."""

    def begin_to_wait(self) -> Coroutine[Any, Any, None]:
        """As ``wait_for_save``, of the step that is now, whenever it is awaited."""
