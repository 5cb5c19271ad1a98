"""asynckv's counts as vLLM's own metrics: ``vllm:asynckv_loads`` and so on."""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from asynckv.integrations.vllm.counts import COUNTERS, GAUGES, added, summary

__all__ = ("AsyncKVPromMetrics", "AsyncKVStats")

_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
_LONG_BUCKETS_S: Final = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class AsyncKVStats(KVConnectorStats):  # type: ignore[misc]
    """What happened since the last report."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Nothing happened."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return what both say, of two ranks or of two reports."""
        return AsyncKVStats(added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's log says of an interval."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())


class AsyncKVPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters, gauges, and a histogram of how long loads take."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counters = {
            name: self._of_each_engine(
                self._counter_cls(
                    name=f"vllm:asynckv_{name}",
                    documentation=what,
                    labelnames=self._labelnames,
                )
            )
            for name, what in COUNTERS.items()
        }
        self._gauges = {
            name: self._gauge_cls(
                name=f"vllm:asynckv_{name}",
                documentation=what,
                labelnames=self._labelnames,
                multiprocess_mode="mostrecent",
            )
            for name, what in GAUGES.items()
        }
        self._said: dict[int, dict[str, dict[str, int]]] = {}
        self._load_seconds = self._of_each_engine(
            self._histogram_cls(
                name="vllm:asynckv_load_seconds",
                documentation="How long a request waited for its KV.",
                buckets=[*_BUCKETS_S, *_LONG_BUCKETS_S],
                labelnames=self._labelnames,
            )
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take one report in."""
        for name, counter in self._counters.items():
            if count := transfer_stats_data.get(name, 0):
                counter[engine_idx].inc(count)
        for seconds in transfer_stats_data.get("load_seconds", ()):
            self._load_seconds[engine_idx].observe(seconds)
        if gauges := transfer_stats_data.get("gauges"):
            self._set(gauges, engine_idx)

    def _set(self, gauges: dict[str, dict[str, int]], engine_idx: int) -> None:
        said = self._said.setdefault(engine_idx, {})
        said.update(gauges)
        for name, gauge in self._gauges.items():
            values = [part[name] for part in said.values() if name in part]
            if values:  # what its kind of connector has not is not shown as 0
                labels = self.per_engine_labelvalues[engine_idx]
                gauge.labels(*labels).set(sum(values))

    def _of_each_engine(self, metric: Any) -> Any:
        return create_metric_per_engine(metric, self.per_engine_labelvalues)
