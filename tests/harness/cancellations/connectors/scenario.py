"""One thing that is cancelled, on one kind of ground, and what that is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from harness.cancellations.sweeper import Sweeper

__all__ = ("ConnectorScenario",)

_Ground = TypeVar("_Ground")


@dataclasses.dataclass(frozen=True)
class ConnectorScenario(Generic[_Ground]):
    """``run`` sweeps calls that ``covers`` names.

    What ``is_costly`` is cancelled at random moments less often.
    """

    run: Callable[[_Ground, Sweeper], Awaitable[None]]
    covers: tuple[str, ...]
    is_costly: bool = False

    @property
    def name(self) -> str:
        """What is to hold, as a name."""
        return self.run.__name__
