from __future__ import annotations

import pytest

from asynckv.processes import ProcessBound
from harness.forks import ForkServer

FORK = """
import asyncio, os, sys, warnings
import torch
import asynckv

# Newer Pythons warn of what this is about: a fork beside other threads.
warnings.simplefilter("ignore", DeprecationWarning)

async def refused(*calls):
    for call in calls:
        try:
            await call()
        except asynckv.WrongLoop:
            continue
        print("not refused", call)

def child(peer, pipe, buffer, server):
    asyncio.set_event_loop(None)
    asyncio._set_running_loop(None)
    asyncio.new_event_loop().run_until_complete(
        refused(
            lambda: peer.lookup.peek([1]),
            lambda: peer.lookup.drop_select([1]),
            lambda: peer.store.get("name"),
            lambda: pipe.send_tensor(torch.ones(1)),
            lambda: pipe.recv_tensor(),
            lambda: buffer.insert([1], None, torch.ones(1), None, None),
            peer.aclose, pipe.aclose, buffer.aclose, server.aclose,
        )
    )
    for mine in (peer, pipe, buffer, server):
        mine.abort()

async def main():
    large = torch.ones(300_000)
    async with (
        asynckv.LookupBuffer("1GiB") as buffer,
        asynckv.StoreBuffer("1MiB") as store,
        asynckv.serve(sys.argv[1], lookup=buffer, store=store) as server,
        asynckv.listen_pipe("tcp://127.0.0.1:0") as listener,
        asynckv.connect(server.url) as peer,
        asynckv.open_pipe(listener.url) as pipe,
    ):
        far = await listener.accept()
        await peer.lookup.insert([1], None, large, None, None)
        await peer.lookup.drop_select([1])
        await pipe.send_tensor(large)
        await far.recv_tensor()
        waiting = asyncio.create_task(peer.lookup.drop_select([7]))
        await asyncio.sleep(0)
        if not (pid := os.fork()):
            try:
                child(peer, pipe, buffer, server)
                sys.stdout.flush()
            finally:
                os._exit(0)
        await asyncio.to_thread(os.waitpid, pid, 0)
        async with asyncio.timeout(10), asynckv.connect(server.url) as other:
            await other.lookup.insert([7], None, large, None, None)
            assert torch.equal((await waiting).key, large)
            await pipe.send_tensor(large)
            assert torch.equal(await far.recv_tensor(), large)
        await far.aclose()
    print("the parent went on")

asyncio.run(main())
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("scheme", ["tcp", "unix"])
async def test_a_forked_child_can_use_nothing_and_harms_nothing(
    forks: ForkServer, scheme: str, tmp_path: object
) -> None:
    url = "tcp://127.0.0.1:0" if scheme == "tcp" else f"unix://{tmp_path}/a.sock"
    assert await forks.printed_by(FORK, url) == "the parent went on\n"


def test_what_was_made_here_is_no_copy() -> None:
    mine = ProcessBound()
    assert mine._is_copy
    mine._own()
    assert not mine._is_copy
