from __future__ import annotations

import asyncio
import sys

import msgspec

from harness.crashes.orders import Order, Report

MODULE = "harness.crashes.forkserver"


async def test_a_worker_that_ends_is_reported_with_its_error() -> None:
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", MODULE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    nowhere = Order("producer", "p", "unix:///nowhere/at/all", seed=1)
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(msgspec.json.encode(nowhere) + b"\n")
    born, gone = [
        msgspec.json.decode(await server.stdout.readline(), type=Report)
        for _ in range(2)
    ]
    server.stdin.close()
    _, complaint = await server.communicate()
    assert (born.word, gone.word) == ("pid", "gone")
    assert born.pid == gone.pid and gone.number >> 8 == 1
    assert b"PeerLost" in complaint
