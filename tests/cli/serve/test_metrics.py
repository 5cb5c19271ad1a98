"""What is counted, as Prometheus reads it."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import Server, serve
from asynckv.buffers.statistics import Counters, StoreCounters
from asynckv.cli.serve.metrics import metrics_text
from asynckv.stores.tiered import TieredStore
from asynckv.testing.lookup_checks.values import MIB
from harness.tiers import DictTier

GAUGES = {
    *("max_bytes", "used_bytes", "peak_bytes", "pinned_bytes", "handed_out_bytes"),
    *("waiting_inserts", "waiting_selects", "entries", "leased", "outside_bytes"),
    *("mapped_by", "oldest_insert_wait_seconds", "waiting_puts", "keys"),
    *("oldest_put_wait_seconds", "is_loading", "is_storing", "waiting"),
    "waiting_bytes",
}


class Served(NamedTuple):
    lookup: LookupBuffer
    store: TieredStore
    server: Server

    async def text(self) -> bytes:
        return await metrics_text(
            is_ready=True, server=self.server, lookup=self.lookup, store=self.store
        )

    async def metrics(self) -> dict[str, dict[str, float]]:
        """Return what is told, by name, then by labels."""
        text = await self.text()
        found: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                labels = ",".join(sample.labels.values())
                found.setdefault(sample.name, {})[labels] = sample.value
        return found


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with (
        LookupBuffer(4 * MIB) as lookup,
        TieredStore(4 * MIB, [DictTier(), DictTier()], drain_s=0.1) as store,
        serve("mem://", lookup=lookup, store=store) as server,
    ):
        yield Served(lookup, store, server)


async def test_every_number_of_statistics_is_told(served: Served) -> None:
    found = await served.metrics()
    told: dict[str, Any] = {
        "lookup": served.lookup.statistics(),
        "store": served.store.statistics(),
        "tier": next(iter(served.store.statistics().tiers.values())),
    }
    for name, statistics in told.items():
        for field in dataclasses.fields(statistics):
            if field.name in ("tiers", "counts", "fetch_latencies", "store_latencies"):
                continue
            base = f"asynckv_{name}_{field.name.replace('_wait_s', '_wait_seconds')}"
            assert base in found or f"{base}_total" in found, base


async def test_what_only_grows_is_a_counter_and_nothing_else_is(served: Served) -> None:
    found = set(await served.metrics())
    counted = {
        field.name
        for counters in (Counters, StoreCounters)
        for field in dataclasses.fields(counters)
    }
    for name in found:
        if name.endswith("_total"):
            assert name.split("_", 2)[2].removesuffix("_total") not in GAUGES, name
    for name in counted:
        places = ("lookup", "store")
        assert any(f"asynckv_{one}_{name}_total" in found for one in places), name


async def test_numbers_are_those_of_now_and_by_tier(served: Served) -> None:
    async with connect(served.server.url) as peer:
        await peer.store.put("key", torch.ones(MIB, dtype=torch.uint8))
        await served.store.flush()
        await peer.store.get("other")
        found = await served.metrics()
    assert found["asynckv_store_used_bytes"] == {"": MIB}
    assert found["asynckv_store_misses_total"] == {"": 1}
    assert found["asynckv_tier_misses_total"] == {"DictTier": 1, "DictTier'": 1}
    assert found["asynckv_tier_is_storing"] == {"DictTier": 1, "DictTier'": 1}
    assert found["asynckv_peers"] == {"": 1} and found["asynckv_ready"] == {"": 1}


async def test_what_a_tier_counts_of_its_own_is_told_of_that_tier_alone(
    tmp_path: Path,
) -> None:
    disk = f"disk://{tmp_path}/kv?max=4MiB"
    async with (
        TieredStore(4 * MIB, [disk, DictTier()], drain_s=0.1) as store,
        serve("mem://", store=store) as server,
    ):
        await store.put("key", torch.ones(MIB // 4, dtype=torch.uint8))
        await store.flush()
        async with LookupBuffer(MIB) as lookup:
            found = await Served(lookup, store, server).metrics()
    assert found["asynckv_tier_keys"] == {"disk": 1}
    assert found["asynckv_tier_max_bytes"] == {"disk": 4 * MIB}
    assert MIB // 4 < found["asynckv_tier_file_bytes"]["disk"] <= 4 * MIB
    assert found["asynckv_tier_evictions_total"] == {"disk": 0}
    assert set(found["asynckv_tier_hits_total"]) == {"disk", "DictTier"}


async def test_times_are_histograms_of_seconds(served: Served) -> None:
    async with connect(served.server.url) as peer:
        await peer.store.put("key", torch.ones(3))
        await served.store.flush()
        found = await served.metrics()
    assert found["asynckv_request_seconds_count"]["put"] == 1
    assert 0 < found["asynckv_request_seconds_sum"]["put"] < 10
    buckets = found["asynckv_request_seconds_bucket"]
    ends = [count for labels, count in buckets.items() if "put" in labels.split(",")]
    assert ends == sorted(ends) and ends[-1] == 1
    assert set(found["asynckv_tier_store_seconds_count"]) == {"DictTier", "DictTier'"}


async def test_words_of_peers_are_in_no_metric(served: Served) -> None:
    async with connect(served.server.url, identity="somebody") as peer:
        await peer.store.put("my key", torch.ones(3))
        text = await served.text()
    assert b"somebody" not in text and b"my key" not in text


async def test_without_anything_open_it_says_that_it_is_not_ready() -> None:
    text = await metrics_text(is_ready=False, server=None, lookup=None, store=None)
    assert b"\nasynckv_ready 0.0\n" in text and b"asynckv_info{version=" in text


async def test_to_tell_it_holds_the_loop_for_less_than_a_millisecond(
    served: Served,
) -> None:
    pieces: list[float] = []
    for _ in range(20):
        telling = asyncio.create_task(served.text())
        longest = 0.0
        while not telling.done():
            began_s = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - began_s)
        pieces.append(longest)
    assert min(pieces) < 1e-3
