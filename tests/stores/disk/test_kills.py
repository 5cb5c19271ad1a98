"""Who writes is killed at any moment: nothing is wrong, lost, or too large then."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from asynckv.stores.disk import DiskTier
from harness.disk_writer import KEYS, find

KILLS: Final = 10
MANY_KILLS: Final = 1_000
MAX_BYTES: Final = 256 * 2**20
MOST_LINES: Final = 60
SEEDS_A_LIFE: Final = 100_000


class Account:
    """What each key may have: seeds, 0 for nothing, -1 for what is torn."""

    def __init__(self) -> None:
        self.may_be = {key: {0} for key in KEYS}

    def hear(self, line: str) -> None:
        word, key, seed = line.split()
        if word == "done":
            self.may_be[key] = {int(seed)}
        else:
            self.may_be[key] |= {int(seed), 0, -1}


def kill_a_writer(path: Path, seed: int, account: Account) -> None:
    """Let one write as long as it says so many lines, then end it in what it does."""
    arguments = [str(path), str(MAX_BYTES), str(seed)]
    with subprocess.Popen(
        [sys.executable, "-m", "harness.disk_writer", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None
        for _ in range(random.randint(1, MOST_LINES)):
            line = writer.stdout.readline()
            assert line, "it has ended by itself"
            account.hear(line)
        writer.send_signal(signal.SIGKILL)
        for line in writer.stdout:
            if line.endswith("\n"):
                account.hear(line)


async def look(path: Path, account: Account) -> int:
    """Compare what is there with what may be; return how many were torn."""
    torn = 0
    async with DiskTier(path, MAX_BYTES) as tier:
        await tier.probe()
        await tier.scanned()
        assert not tier.statistics().evictions
        for key in KEYS:
            found = await find(tier, key)
            assert found in account.may_be[key], (key, found, account.may_be[key])
            account.may_be[key] = {found}
            torn += found == -1
    blocks = sum(os.stat(path / name).st_blocks for name in os.listdir(path))
    assert 512 * blocks <= MAX_BYTES
    return torn


async def kill_writers(path: Path, kills: int) -> int:
    account, torn = Account(), 0
    for life in range(1, kills + 1):
        kill_a_writer(path, life * SEEDS_A_LIFE, account)
        torn += await look(path, account)
    return torn


@pytest.mark.multiprocess
@pytest.mark.slow
async def test_a_killed_writer_leaves_what_was_accepted_and_nothing_wrong(
    tmp_path: Path,
) -> None:
    await kill_writers(tmp_path / "kv", KILLS)


@pytest.mark.chaos
@pytest.mark.longest
@pytest.mark.multiprocess
@pytest.mark.timeout(3600)
async def test_so_it_is_after_many_kills(tmp_path: Path) -> None:
    assert await kill_writers(tmp_path / "kv", MANY_KILLS), "none was torn"
