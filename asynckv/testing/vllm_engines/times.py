"""How long an engine's steps take, and how much of it its connector's calls."""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any, Final

__all__ = ("StepTimes",)

_CALLS: Final = (
    *("bind_connector_metadata", "build_connector_meta", "build_connector_worker_meta"),
    *("clear_connector_metadata", "get_block_ids_with_load_errors"),
    *("get_kv_connector_kv_cache_events", "get_kv_connector_stats"),
    *("get_num_new_matched_tokens", "get_transfer_results", "handle_preemptions"),
    *("has_pending_push_work", "on_new_request", "request_finished_all_groups"),
    *("save_kv_layer", "start_load_kv", "take_events", "update_connector_output"),
    *("update_state_after_alloc", "wait_for_layer_load", "wait_for_save"),
)
"""What vLLM calls of a connector while requests come, run and go."""


class StepTimes:
    """Of steps that ran the model, and of calls in any step.

    Calls within calls are counted once. A call's own clock costs 0.1 us, and is in it.
    """

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._calls: list[float] = []
        self._idle_steps = 0
        self._in_step = 0.0
        self._depth = 0

    def watch(self, connector: Any) -> None:
        """Time the calls of ``connector``."""
        for name in _CALLS:
            function = getattr(connector, name)
            # Watched once already: the clock is started again, not doubled.
            function = getattr(function, "__wrapped__", function)
            setattr(connector, name, self._timed(function))

    def end_step(self, seconds: float, has_executed: bool) -> None:
        """A step has taken so long; note it if it ran the model."""
        if has_executed:
            self._steps.append(seconds)
            self._calls.append(self._in_step)
            self._in_step = 0.0
        else:
            self._idle_steps += 1

    def report(self) -> dict[str, Any]:
        """Return medians and sums, in seconds."""
        middle = statistics.median
        return {
            "steps": len(self._steps),
            "idle_steps": self._idle_steps,
            "step_s": middle(self._steps) if self._steps else 0.0,
            "steps_s": sum(self._steps),
            "call_s": middle(self._calls) if self._calls else 0.0,
            "calls_s": sum(self._calls) + self._in_step,
        }

    def _timed(self, function: Any) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return function(*args, **kwargs)
            self._depth = 1
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._in_step += time.perf_counter() - began
                self._depth = 0

        return timed
