from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch

import asynckv
from asynckv.testing.faults.processes import frozen_peer
from asynckv.testing.faults.proxy import Proxy
from harness.children import line_of, running, tell

pytestmark = pytest.mark.multiprocess

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


SERVER = """
import asyncio, asynckv, torch
async def main():
    async with (
        asynckv.LookupBuffer("4MiB", drain_s=0) as lookup,
        asynckv.serve("tcp://127.0.0.1:0", lookup=lookup) as server,
    ):
        await lookup.insert([1], None, torch.ones(3), None, None)
        print(server.url, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
CONSUMER = """
import asyncio, asynckv, sys
async def main():
    async with asynckv.connect(sys.argv[1]) as peer:
        async with peer.lookup.drop_select([1]) as entry:
            print("has it", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
try:
    asyncio.run(main())
except asynckv.LeaseLost:
    print("LeaseLost", flush=True)
"""


async def test_a_frozen_process_goes_on_where_it_was() -> None:
    async with running(ECHO) as process:
        async with frozen_peer(process.pid):
            assert state_of(process.pid) == "T"
            await tell(process, "1")
        assert await line_of(process) == "1"


async def test_one_that_dies_meanwhile_is_no_error() -> None:
    async with running(ECHO) as process, frozen_peer(process.pid):
        process.kill()
        assert await process.wait() == -9


async def test_only_a_child_can_be_frozen() -> None:
    with pytest.raises(ValueError, match="has started"):
        async with frozen_peer(os.getppid()):
            raise AssertionError
    assert state_of(os.getppid()) != "T"


async def test_one_that_has_ended_cannot_be_frozen() -> None:
    async with running(ECHO) as process:
        process.kill()
        await process.wait()
        with pytest.raises(ValueError, match="has ended"):
            async with frozen_peer(process.pid):
                raise AssertionError


@pytest.mark.slow
async def test_a_frozen_server_is_noticed_and_found_again() -> None:
    async with running(SERVER) as process:
        async with (
            Proxy(await line_of(process), heartbeat_ms=100) as proxy,
            asynckv.connect(proxy.url, reconnect_s=0) as once,
            asynckv.connect(proxy.url, reconnect_s=20) as patient,
            asyncio.timeout(20),
        ):
            async with frozen_peer(process.pid):
                waiting = asyncio.create_task(patient.lookup.drop_select([1]))
                with pytest.raises(asynckv.PeerLost, match="3 heartbeats"):
                    await once.lookup.drop_select([2])
                assert not waiting.done()
            assert (await waiting).nbytes == 20


@pytest.mark.slow
async def test_a_frozen_consumer_loses_its_entry_and_learns_of_it() -> None:
    async with (
        asynckv.LookupBuffer("4MiB", drain_s=0) as lookup,
        asynckv.serve("tcp://127.0.0.1:0", lookup=lookup) as server,
        Proxy(server.url, heartbeat_ms=100) as proxy,
        running(CONSUMER, proxy.url) as process,
        asyncio.timeout(30),
    ):
        await lookup.insert([1], None, torch.ones(3), None, None)
        assert await line_of(process) == "has it"
        async with frozen_peer(process.pid):
            assert (await lookup.drop_select([1])).attempt == 2
        await tell(process, "go on")
        assert await line_of(process) == "LeaseLost"
        assert lookup.statistics().acknowledged == 1
