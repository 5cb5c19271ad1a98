"""Stats in vLLM's own metrics: seen from the inside, without an engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.vllm

_CODE = """
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


def test_what_two_workers_counted_is_seen_by_prometheus() -> None:
    subprocess.run([sys.executable, "-c", _CODE], check=True, timeout=60)
