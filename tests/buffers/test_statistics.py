from __future__ import annotations

import dataclasses

import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.statistics import (
    Counters,
    LookupStatistics,
    StoreCounters,
    StoreStatistics,
)
from asynckv.buffers.store import StoreBuffer


def names(kind: type[object]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]


def test_every_counter_is_in_the_statistics() -> None:
    assert names(Counters) <= names(LookupStatistics)
    assert names(StoreCounters) <= names(StoreStatistics)


def test_a_new_buffer_has_counted_nothing() -> None:
    values = dataclasses.asdict(LookupBuffer("1KiB").statistics())
    assert values.pop("max_bytes") == 1024
    assert not any(values.values())


async def test_gauges_and_counters_follow_an_entry() -> None:
    async with LookupBuffer("1KiB") as buffer:
        await buffer.insert([1], None, None, None, None)
        async with buffer.drop_select([1]):
            now = buffer.statistics()
            assert (now.used_bytes, now.entries, now.leased) == (8, 1, 1)
        now = buffer.statistics()
        assert (now.inserted, now.delivered, now.acknowledged) == (1, 1, 1)
        assert (now.used_bytes, now.peak_bytes, now.entries) == (0, 8, 0)


async def test_a_wait_for_the_systems_memory_is_no_wait_for_room() -> None:
    megabyte = torch.ones(2**20, dtype=torch.uint8)
    async with (
        LookupBuffer("64MiB", drain_s=0) as buffer,
        StoreBuffer("64MiB") as store,
    ):
        await buffer.insert([1], None, megabyte, None, None)
        await store.put("key", megabyte)
        assert buffer.statistics().room_waits == store.statistics().room_waits == 0
