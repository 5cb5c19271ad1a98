"""One thing that is cancelled, and which public coroutines that is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

from harness.cancellations.entries import LARGE, SMALL
from harness.cancellations.grounds import GROUNDS, Ground, Kind
from harness.cancellations.sweeper import Sweeper

__all__ = ("Scenario",)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """``run`` sweeps calls that ``covers`` names, with tensors of each of ``sizes``.

    ``kinds`` are the grounds where it makes sense. What ``is_costly`` is cancelled
    at random moments less often. A ``label`` tells several apart that run the same.
    """

    run: Callable[[Ground, Sweeper, int], Awaitable[None]]
    covers: tuple[str, ...]
    kinds: tuple[Kind, ...] = GROUNDS
    sizes: tuple[int, ...] = (SMALL, LARGE)
    is_costly: bool = False
    label: str = ""

    @property
    def name(self) -> str:
        """What is to hold, as a name: its label, or else that of what it runs."""
        return self.label or getattr(self.run, "__name__", "")
