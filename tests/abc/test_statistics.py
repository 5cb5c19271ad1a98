from __future__ import annotations

import dataclasses

import pytest

from asynckv.abc import KVCacheStatistics, KVLookupStatistics, KVStoreStatistics


@pytest.mark.parametrize("kind", [KVLookupStatistics, KVStoreStatistics])
def test_what_every_buffer_tells_is_told_by_each_kind(
    kind: type[KVCacheStatistics],
) -> None:
    every = {field.name for field in dataclasses.fields(KVCacheStatistics)}
    assert every < {field.name for field in dataclasses.fields(kind)}
