from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from asynckv.testing.faults.processes import frozen_peer

pytestmark = pytest.mark.multiprocess

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextlib.asynccontextmanager
async def echo() -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ECHO, stdin=pipe, stdout=pipe
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def test_a_frozen_process_goes_on_where_it_was() -> None:
    async with echo() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        async with frozen_peer(process.pid):
            assert state_of(process.pid) == "T"
            process.stdin.write(b"1\n")
        assert await process.stdout.readline() == b"1\n"


async def test_one_that_dies_meanwhile_is_no_error() -> None:
    async with echo() as process, frozen_peer(process.pid):
        process.kill()
        assert await process.wait() == -9


async def test_only_a_child_can_be_frozen() -> None:
    with pytest.raises(ValueError, match="has started"):
        async with frozen_peer(os.getppid()):
            raise AssertionError
    assert state_of(os.getppid()) != "T"


async def test_one_that_has_ended_cannot_be_frozen() -> None:
    async with echo() as process:
        process.kill()
        await process.wait()
        with pytest.raises(ValueError, match="has ended"):
            async with frozen_peer(process.pid):
                raise AssertionError
