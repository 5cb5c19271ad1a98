"""What is counted, as Prometheus's text: ``asynckv_store_hits_total`` and so on.

Statistics are read on the loop, whose they are. They become text one group at a time,
and others have their turn in between. Needs the extra ``metrics``.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from asynckv import __version__
from asynckv.abc import KVCacheStatistics
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import Server
from asynckv.buffers.statistics import Counters, StoreCounters
from asynckv.buffers.store import StoreBuffer
from asynckv.observability.latencies import BOUNDS_S, Latencies
from asynckv.stores.health import TierStatistics
from asynckv.stores.tiered import TieredStore

__all__ = ("CONTENT_TYPE", "metrics_text")

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_OF_TIERS: Final = {
    *("failed", "refused", "late", "corrupt", "accepted", "unwritten"),
    *("unverified", "replaced", "no_room"),
}
_COUNTERS: Final = frozenset(
    field.name
    for counters in (Counters, StoreCounters)
    for field in dataclasses.fields(counters)
) | {"late_views", "refused_slabs", *_OF_TIERS}
"""What only grows; all else is a gauge."""

_BUCKETS: Final = (*(f"{bound_s:g}" for bound_s in BOUNDS_S), "+Inf")


async def metrics_text(
    *,
    is_ready: bool,
    server: Server | None,
    lookup: LookupBuffer | None,
    store: StoreBuffer | None,
) -> bytes:
    """Return what there is now of each. A cancelled call leaves no trace."""
    text = []
    for group in _groups(is_ready, server, lookup, store):
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(group))
        text.append(generate_latest(registry))
        await asyncio.sleep(0)
    return b"".join(text)


class _Collected(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _groups(
    is_ready: bool,
    server: Server | None,
    lookup: LookupBuffer | None,
    store: StoreBuffer | None,
) -> Iterator[Iterable[Metric]]:
    yield _of_the_process(is_ready, server)
    if server is not None:
        what = "How long requests took, from their frame to their answer."
        by_name = server.request_latencies
        yield [_histogram("asynckv_request_seconds", what, "request", by_name)]
    if lookup is not None:
        told = _fields_of(lookup.statistics())
        yield _numbers("asynckv_lookup", "LookupStatistics", {"": told})
    if store is not None:
        told = _fields_of(store.statistics())
        yield _numbers("asynckv_store", "StoreStatistics", {"": told})
    if isinstance(store, TieredStore):
        tiers = store.statistics().tiers
        numbers = {
            name: {**tier.counts, **_fields_of(tier)} for name, tier in tiers.items()
        }
        yield _numbers("asynckv_tier", "TierStatistics", numbers, label="tier")
        for name in ("fetch", "store"):
            what = f"How long calls took that {name} values."
            by_tier = {one: getattr(tiers[one], f"{name}_latencies") for one in tiers}
            yield [_histogram(f"asynckv_tier_{name}_seconds", what, "tier", by_tier)]


def _of_the_process(is_ready: bool, server: Server | None) -> Iterator[Metric]:
    version = GaugeMetricFamily(
        "asynckv_info", "Which version this is.", labels=["version"]
    )
    version.add_metric([__version__], 1)
    yield version
    yield GaugeMetricFamily("asynckv_ready", "Whether it serves.", int(is_ready))
    if server is not None:
        yield GaugeMetricFamily(
            "asynckv_peers", "How many are connected.", len(server.peers)
        )
        yield GaugeMetricFamily(
            *("asynckv_waiting_bytes", "What requests that wait keep."),
            server.waiting_bytes,
        )
        yield CounterMetricFamily(
            *("asynckv_refused_requests", "Requests that were one too many."),
            server.refused_requests,
        )


def _fields_of(statistics: KVCacheStatistics | TierStatistics) -> dict[str, object]:
    fields = dataclasses.fields(statistics)
    return {field.name: getattr(statistics, field.name) for field in fields}


def _numbers(
    prefix: str, kind: str, found: Mapping[str, Mapping[str, object]], label: str = ""
) -> Iterator[Metric]:
    """Yield the numbers of statistics, a family each, by the ``label`` if there is one.

    Of a mapping it is the sum: its keys are words of peers.
    """
    for field in dict.fromkeys(name for told in found.values() for name in told):
        values = {by: _number(told.get(field)) for by, told in found.items()}
        if field == "counts" or set(values.values()) == {None}:
            continue
        is_counter = field in _COUNTERS
        family = CounterMetricFamily if is_counter else GaugeMetricFamily
        name = field
        if name.endswith("_s"):
            name = name.removesuffix("_s") + "_seconds"
        metric = family(
            *(f"{prefix}_{name}", f"{field} of asynckv's {kind}."),
            labels=[label] if label else [],
        )
        for by, value in values.items():
            if value is not None:
                metric.add_metric([by] if label else [], value)
        yield metric


def _number(value: object) -> float | None:
    if isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        counts = list(value.values())
        return sum(counts) if all(isinstance(one, int) for one in counts) else None
    return None


def _histogram(
    name: str, what: str, label: str, found: Mapping[str, Latencies]
) -> Metric:
    metric = HistogramMetricFamily(name, what, labels=[label])
    for by, one in found.items():
        buckets = list(zip(_BUCKETS, one.cumulative(), strict=True))
        metric.add_metric([by], buckets, one.total_s)
    return metric
