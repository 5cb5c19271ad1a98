from __future__ import annotations

import asyncio
import os
import signal

import pytest

from asynckv.cli.process import INTERRUPTED, until_ended


async def test_what_is_done_is_returned() -> None:
    async def work() -> int:
        return INTERRUPTED

    assert await until_ended(work()) == 130


async def test_a_polite_end_is_a_cancellation() -> None:
    async def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(until_ended(work()))
