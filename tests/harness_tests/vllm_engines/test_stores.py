from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import asynckv
from harness.redis_servers import PROGRAM
from harness.vllm_engines import free_url
from harness.vllm_engines.stores import redis_behind, small_disk, storing

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"there is no {PROGRAM}"),
]


def put(url: str, count: int) -> None:
    async def put() -> None:
        async with asynckv.connect(url) as peer:
            for number in range(count):
                await peer.store.put(f"{number}", torch.zeros(2**18, dtype=torch.uint8))

    asyncio.run(put())


def has(url: str) -> bool:
    async def get() -> bool:
        async with asynckv.connect(url) as peer:
            return await peer.store.get("0") is not None

    return asyncio.run(get())


def test_a_store_that_is_killed_finds_again_what_redis_has(tmp_path: Path) -> None:
    url = free_url()
    with redis_behind(tmp_path) as redis, storing(url, redis.url) as store:
        put(url, 1)
        assert store.wait_for(1) == 1
        store.kill()
        store.start()
        assert has(url)
        assert store.count("hits_total") == 1
        store.kill()
        redis.kill()
        redis.start()
        store.start()
        assert not has(url)


def test_a_small_disk_is_small_and_nobody_else_sees_it(tmp_path: Path) -> None:
    url, tier, inside = free_url(), f"disk:{tmp_path}?max=1GiB", small_disk(tmp_path)
    if subprocess.run([*inside, "true"], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    with storing(url, tier, inside=inside) as store:
        put(url, 1)
        store.wait_for(1)
        disk = os.statvfs(f"/proc/{store.pid}/root{tmp_path}")
        assert disk.f_blocks * disk.f_frsize == 6 * 2**20
        assert not list(tmp_path.iterdir())
