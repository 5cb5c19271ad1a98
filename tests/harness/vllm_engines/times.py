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
    """Of steps that ran the model, and of calls in any step, on the engine's thread.

    By the wall and in CPU seconds: beside busy neighbours a call is interrupted, and
    the wall counts it as the call's. Calls within calls are counted once. To read the
    clock of a thread takes CPU too, up to 4 us beside a model that has the caches: in
    each step a call of nothing is timed, and as much is taken off every call.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[float, float]] = []
        self._calls: list[float] = []
        self._idle_steps = 0
        self._in_step = 0.0
        self._began_cpu = time.thread_time()
        self._depth = 0
        self._of_call: dict[str, list[float]] = {}
        self._of_nothing: list[float] = [0, 0.0, 0.0]
        self._call_nothing = self._timed(lambda: None, self._of_nothing)
        self._watched: list[Any] = []

    def watch(self, connector: Any) -> None:
        """Time the calls of ``connector``, until :meth:`stop`."""
        self._watched.append(connector)
        for name in _CALLS:
            of_call = self._of_call.setdefault(name, [0, 0.0, 0.0])
            function = getattr(connector, name)
            setattr(connector, name, self._timed(function, of_call))

    def stop(self) -> None:
        """Leave the connectors as they were: their calls take no longer than ever."""
        for connector in self._watched:
            for name in _CALLS:
                delattr(connector, name)
        self._watched.clear()

    def begin_step(self) -> None:
        """A step begins."""
        if self._watched:
            in_step = self._in_step
            self._call_nothing()
            self._in_step = in_step
        self._began_cpu = time.thread_time()

    def end_step(self, seconds: float, has_executed: bool) -> None:
        """A step has taken so long; note it if it ran the model."""
        if has_executed:
            self._steps.append((seconds, time.thread_time() - self._began_cpu))
            self._calls.append(self._in_step)
            self._in_step = 0.0
        else:
            self._idle_steps += 1

    def report(self) -> dict[str, Any]:
        """Return medians and sums, in seconds, and for each call its count and both."""
        middle = statistics.median
        clock_s = self._of_nothing[2] / max(self._of_nothing[0], 1)
        calls = {
            name: (count, wall, cpu - count * clock_s)
            for name, (count, wall, cpu) in self._of_call.items()
        }
        return {
            "steps": len(self._steps),
            "idle_steps": self._idle_steps,
            "step_s": middle(wall for wall, _ in self._steps) if self._steps else 0.0,
            "step_cpu_s": middle(cpu for _, cpu in self._steps) if self._steps else 0.0,
            "call_s": middle(self._calls) if self._calls else 0.0,
            "calls_s": sum(wall for _, wall, _ in calls.values()),
            "calls_cpu_s": sum(cpu for _, _, cpu in calls.values()),
            "clock_cpu_s": clock_s,
            "calls": calls,
        }

    def _timed(self, function: Any, of_call: list[float]) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return function(*args, **kwargs)
            self._depth = 1
            cpu, began = time.thread_time(), time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                wall = time.perf_counter() - began
                self._depth = 0
                self._in_step += wall
                of_call[0] += 1
                of_call[1] += wall
                of_call[2] += time.thread_time() - cpu

        return timed
