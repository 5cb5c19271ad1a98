"""Stats in vLLM's own metrics: seen from the inside, without an engine."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from asynckv.integrations.vllm.counts import (
    COUNTERS,
    GAUGES,
    added,
    gauges_of,
    summary,
)


def test_two_reports_add_up() -> None:
    one = {"loads": 1, "loaded_bytes": 10, "load_seconds": [0.1]}
    other = {"loads": 2, "saves": 1, "load_seconds": [0.2, 0.3]}
    total = added(one, other)
    assert (total["loads"], total["saves"], total["loaded_bytes"]) == (3, 1, 10)
    assert total["load_seconds"] == [0.1, 0.2, 0.3]


def test_nothing_and_nothing_is_nothing() -> None:
    assert not any(added({}, {}).values())


def test_every_counter_is_in_the_line_of_the_log() -> None:
    line = summary(dict.fromkeys(COUNTERS, 2_000_000) | {"load_seconds": [0.2, 0.1]})
    assert line["Loads"] == line["Failed saves"] == 2_000_000
    assert line["Loaded MB"] == line["Saved MB"] == 2.0
    assert (line["Median load (ms)"], line["Longest load (ms)"]) == (200.0, 200.0)


def test_a_line_of_no_loads_can_be_written() -> None:
    assert set(summary({}).values()) == {0}


def test_of_two_reports_the_later_one_says_what_there_is() -> None:
    one = {"gauges": {"0": {"links": 1}, "1": {"links": 2}}}
    other = {"gauges": {"0": {"links": 0}}}
    total = added(one, other)["gauges"]
    assert total == {"0": {"links": 0}, "1": {"links": 2}}


def test_what_a_kind_of_connector_has_not_is_not_told() -> None:
    buffer = types.SimpleNamespace(used_bytes=7, entries=2)
    p2p = types.SimpleNamespace(links=3, buffer=buffer)
    assert gauges_of(p2p) == {"links": 3, "waiting_bytes": 7, "waiting_entries": 2}
    store = types.SimpleNamespace(is_reachable=False)
    assert gauges_of(store) == {"store_reachable": 0}
    assert gauges_of(object()) == {}


def test_the_page_on_vllm_has_every_metric_and_no_other() -> None:
    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    names = [*(f"{name}_total" for name in COUNTERS), *GAUGES, "load_seconds"]
    assert set(re.findall(r"`vllm:asynckv_(\w+)`", page)) == set(names)


_METRICS = """
from prometheus_client import Counter, Gauge, Histogram, REGISTRY
from types import SimpleNamespace
from asynckv.integrations.vllm import AsyncKVConnector

config = SimpleNamespace(kv_transfer_config=None)
kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
metrics = AsyncKVConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
one = AsyncKVConnector.build_kv_connector_stats({"loads": 2, "load_seconds": [0.1]})
two = AsyncKVConnector.build_kv_connector_stats({"loads": 1, "failed_loads": 1})
both = one.aggregate(two)
assert not both.is_empty()
assert both.reduce()["Loads"] == 3
metrics.observe(both.to_dict())

def value(name):
    return REGISTRY.get_sample_value(name, {"engine": "0"})

assert value("vllm:asynckv_loads_total") == 3
assert value("vllm:asynckv_failed_loads_total") == 1
assert value("vllm:asynckv_load_seconds_count") == 1
gauges = {"0": {"links": 1, "waiting_bytes": 5}, "1": {"links": 2}}
metrics.observe({"gauges": gauges})
metrics.observe({"gauges": {"0": {"links": 0, "waiting_bytes": 0}}})
assert value("vllm:asynckv_links") == 2
assert value("vllm:asynckv_waiting_bytes") == 0
assert value("vllm:asynckv_store_reachable") is None
both.reset()
assert both.is_empty()
"""


@pytest.mark.vllm
def test_what_two_workers_counted_is_seen_by_prometheus() -> None:
    subprocess.run([sys.executable, "-c", _METRICS], check=True, timeout=60)
