"""Fakes, connected pairs and checks for your own tests."""

from __future__ import annotations

from asynckv.testing.cancellation import (
    CancelMode,
    Outcome,
    SweepCounts,
    sweep_cancellation,
)
from asynckv.testing.tasks import use_across_tasks

__all__ = (
    "CancelMode",
    "Outcome",
    "SweepCounts",
    "sweep_cancellation",
    "use_across_tasks",
)
