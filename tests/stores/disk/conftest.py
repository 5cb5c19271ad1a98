"""Disk tiers in folders that are there for one test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from asynckv.stores.disk import DiskTier
from asynckv.stores.disk.calls import FileCalls
from harness.disk_faults import OpenDisk


@pytest.fixture
def open_disk(tmp_path: Path) -> OpenDisk:
    """Opens tiers in one folder, one after the other: 16 MiB unless said."""

    @contextlib.asynccontextmanager
    async def opened(
        max_bytes: int = 16 * 2**20,
        *,
        calls: FileCalls | None = None,
        threads: int = 4,
        close_grace_s: float = 1.0,
        full_retry_s: float = 60.0,
    ) -> AsyncIterator[DiskTier]:
        async with DiskTier(
            tmp_path / "kv",
            max_bytes,
            calls=calls,
            threads=threads,
            close_grace_s=close_grace_s,
            full_retry_s=full_retry_s,
        ) as tier:
            await tier.probe()
            await tier.scanned()
            yield tier

    return opened
