"""Who writes is killed at any moment: nothing is wrong, lost, or too large then."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from asynckv.stores.disk import DiskTier
from harness.disk_writer import KEYS, find

KILLS: Final = 25
MANY_KILLS: Final = 500
MOST_LINES: Final = 60
SEEDS_A_LIFE: Final = 100_000
BOUNDS: Final = {"all": 256 * 2**20, "a part": 24 * 2**20}
"""Of a disk that has room for everything, or for three of the largest values."""


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


class Writers:
    """Processes that write to a disk, one after the other. None ends by itself."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "harness.disk_writer", str(path), str(max_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def kill_one(self, seed: int, account: Account) -> None:
        """Let one write as long as it says some lines, then end it in what it does."""
        assert self._parent.stdin is not None
        self._parent.stdin.write(f"{seed}\n")
        self._parent.stdin.flush()
        word, pid = self._line().split()
        assert word == "pid"
        for _ in range(random.randint(1, MOST_LINES)):
            account.hear(self._line())
        os.kill(int(pid), signal.SIGKILL)
        while (line := self._line()) != "over\n":
            account.hear(line)

    def close(self) -> None:
        self._parent.communicate()

    def _line(self) -> str:
        assert self._parent.stdout is not None
        line = self._parent.stdout.readline()
        assert line, "they have ended by themselves"
        return line


async def look(path: Path, max_bytes: int, account: Account) -> Iterator[int]:
    """Compare what is there with what may be; return it."""
    async with DiskTier(path, max_bytes) as tier:
        await tier.probe()
        await tier.scanned()
        for key in KEYS:
            found = await find(tier, key)
            has_gone = found == 0 and max_bytes == BOUNDS["a part"]
            assert found in account.may_be[key] or has_gone, (key, found, account)
            account.may_be[key] = {found}
    blocks = sum(os.stat(path / name).st_blocks for name in os.listdir(path))
    assert 512 * blocks <= max_bytes
    return itertools.chain.from_iterable(account.may_be.values())


async def kill_writers(path: Path, max_bytes: int, kills: int) -> set[int]:
    """Return what was found, in all lives together."""
    account, found = Account(), set[int]()
    writers = Writers(path, max_bytes)
    try:
        for life in range(1, kills + 1):
            writers.kill_one(life * SEEDS_A_LIFE, account)
            found.update(await look(path, max_bytes, account))
    finally:
        writers.close()
    return found


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kept", BOUNDS)
async def test_a_killed_writer_leaves_what_was_accepted_and_nothing_wrong(
    tmp_path: Path, kept: str
) -> None:
    found = await kill_writers(tmp_path / "kv", BOUNDS[kept], KILLS)
    assert len(found) > KILLS, "little was kept"


@pytest.mark.chaos
@pytest.mark.longest
@pytest.mark.multiprocess
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kept", BOUNDS)
async def test_so_it_is_after_many_kills(tmp_path: Path, kept: str) -> None:
    found = await kill_writers(tmp_path / "kv", BOUNDS[kept], MANY_KILLS)
    assert len(found) > MANY_KILLS, "little was kept"
    assert -1 in found or kept != "all", "none was torn"
