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


ABORTED = """
import asyncio, os, sys, threading, warnings
import torch
import asynckv

warnings.simplefilter("ignore", DeprecationWarning)

NUMBERS = torch.arange(400_000)

class Child:
    \"""Aborts all that it has a copy of, when it is told to.\"""

    def __init__(self, *copies):
        go_on, self.say = os.pipe()
        self.pid = os.fork()
        if self.pid:
            return
        try:
            os.read(go_on, 1)
            for copy in copies:
                copy.abort()
            for thread in set(threading.enumerate()) - {threading.current_thread()}:
                thread.join()
        except BaseException as exc:
            print("the child failed:", repr(exc))
            sys.stdout.flush()
        finally:
            os._exit(0)

    async def abort(self):
        os.write(self.say, b"!")
        await asyncio.to_thread(os.waitpid, self.pid, 0)

async def buffers():
    async with (
        asynckv.LookupBuffer("1GiB") as lookup,
        asynckv.StoreBuffer("1GiB") as store,
        asynckv.serve("tcp://127.0.0.1:0", lookup=lookup, store=store) as server,
        asynckv.connect(server.url) as peer,
    ):
        await lookup.insert([1], None, NUMBERS, None, None)
        waiting = asyncio.create_task(peer.lookup.drop_select([7]))
        await asyncio.sleep(0)
        await peer.store.put("name", NUMBERS)  # by then the other one waits there
        await Child(store, lookup).abort()
        yield await store.get("name")
        yield await peer.store.get("name")
        yield (await lookup.drop_select([1])).key
        await lookup.insert([7], None, NUMBERS, None, None)
        yield (await waiting).key

async def pipes():
    async with (
        asynckv.listen_pipe("tcp://127.0.0.1:0") as listener,
        asynckv.open_pipe(listener.url) as near,
        await listener.accept() as far,
    ):
        async def received():
            await near.send_tensor(NUMBERS)
            return await far.recv_tensor()

        while near.transport != sys.argv[2]:
            await received()
        await received()
        child = Child(near, far, listener)
        tensors = [await received() for _ in range(3)]
        await near.send_tensor(NUMBERS)
        await child.abort()
        tensors += [await far.recv_tensor(), await received()]
        for tensor in tensors:
            yield tensor

async def main():
    async with asyncio.timeout(20):
        async for tensor in {"buffers": buffers, "pipes": pipes}[sys.argv[1]]():
            assert torch.equal(tensor, NUMBERS), tensor
    print("nothing was touched")

asyncio.run(main())
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("what", [("buffers",), ("pipes", "map")])
async def test_what_a_forked_child_aborts_stays_as_it_is_in_the_parent(
    forks: ForkServer, what: tuple[str, ...]
) -> None:
    assert await forks.printed_by(ABORTED, *what) == "nothing was touched\n"


def test_what_was_made_here_is_no_copy() -> None:
    mine = ProcessBound()
    assert mine._is_copy
    mine._own()
    assert not mine._is_copy
